import math

import pytest

from autoprec.measure.paired import Limits, backward_call, paired_times


class FakeBlock:
    """Calls of which each moves the clock by what it is said to take."""

    def __init__(self, now, forward, backward, count, log, name):
        self.now, self.times, self.count, self.log, self.name = now, (forward, backward), count, log, name

    def forward(self):
        self.log.append((self.name, self.count))
        self.now[0] += self.times[0]() * self.count

    def prepare_backward(self):
        self.now[0] += 1000.0  # never timed

    def backward(self):
        self.now[0] += self.times[1]() * self.count + self.now[1]


class Bench:
    def __init__(self, start_s=0.0):
        self.now, self.log = [0.0, start_s], []

    def clock(self, call):
        before = self.now[0]
        return call(), self.now[0] - before

    def maker(self, name, forward, backward=0.0):
        as_call = [each if callable(each) else lambda each=each: each for each in (forward, backward)]
        return lambda count: FakeBlock(self.now, *as_call, count, self.log, name)

    def times(self, limits=None, allowance_s=math.inf, **makers):
        return paired_times(
            makers,
            clock=self.clock,
            allowance_s=allowance_s,
            limits=limits or Limits(max_rounds=5),
            backward_call_s=self.now[1],
            now=lambda: self.now[0],
        )


def series(*values):
    """Return a function that gives `values` one after the other, the last one for ever."""
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_forward_and_backward_are_told_apart():
    bench = Bench()
    found = bench.times(fp32=bench.maker("fp32", 0.01, 0.02), bf16=bench.maker("bf16", 0.004, 0.012))
    assert (found["fp32"].forward_s, found["fp32"].backward_s) == pytest.approx((0.01, 0.02))
    assert (found["bf16"].forward_s, found["bf16"].backward_s) == pytest.approx((0.004, 0.012))
    assert found["bf16"].num_rounds == 5
    assert found["bf16"].spread == pytest.approx(0.0, abs=1e-6)


def test_a_slow_spell_of_the_machine_hits_both_formats_of_a_round_alike():
    bench = Bench()
    # The first two calls of fp32 and the first of bf16 come before the rounds; then one pair is four times slower.
    fp32 = bench.maker("fp32", series(0.01, 0.01, 0.01, 0.04, 0.01), 0.0)
    bf16 = bench.maker("bf16", series(0.005, 0.005, 0.02, 0.005), 0.0)
    found = bench.times(Limits(max_rounds=3), fp32=fp32, bf16=bf16)
    assert found["bf16"].total_s / found["fp32"].total_s == pytest.approx(0.5)


def test_the_order_of_a_round_reverses():
    bench = Bench()
    bench.times(Limits(max_rounds=2, min_rounds=1), fp32=bench.maker("a", 0.01), bf16=bench.maker("b", 0.01))
    assert [name for name, _ in bench.log] == ["a", "a", "b", "a", "b", "b", "a"]


def test_short_calls_are_timed_in_blocks_without_what_starting_a_backward_pass_takes():
    bench = Bench(start_s=1e-3)
    found = bench.times(fp32=bench.maker("fp32", 1e-4, 2e-4))
    assert bench.log[-1][1] == 4  # 1 ms over 0.3 ms
    assert (found["fp32"].forward_s, found["fp32"].backward_s) == pytest.approx((1e-4, 2e-4))


def test_what_starting_a_backward_pass_takes_is_where_no_calls_are_made():
    bench = Bench(start_s=7e-5)
    assert backward_call(bench.maker("fp32", 1e-5, 3e-5), bench.clock) == pytest.approx(7e-5)


def test_a_format_that_is_far_too_slow_is_called_once_and_its_backward_not_at_all():
    bench = Bench()
    low = bench.maker("bf16", 1.0, lambda: pytest.fail("its backward ran"))
    found = bench.times(fp32=bench.maker("fp32", 0.01, 0.02), bf16=low)
    assert [name for name, _ in bench.log].count("bf16") == 1
    assert found["bf16"].is_bound
    assert (found["bf16"].forward_s, found["bf16"].backward_s) == (1.0, pytest.approx(0.02))
    assert not found["fp32"].is_bound


def test_a_format_whose_backward_alone_is_too_slow_is_called_once():
    bench = Bench()
    found = bench.times(fp32=bench.maker("fp32", 0.01, 0.02), bf16=bench.maker("bf16", 0.01, 5.0))
    assert [name for name, _ in bench.log].count("bf16") == 1
    assert found["bf16"].is_bound
    assert found["bf16"].total_s == pytest.approx(5.01)


def test_a_format_that_cannot_run_is_infinite_and_says_why():
    bench = Bench()

    def missing():
        raise RuntimeError('"addmm" not implemented for Half\nstack')

    found = bench.times(fp32=bench.maker("fp32", 0.01), fp16=bench.maker("fp16", missing))
    assert found["fp16"].total_s == math.inf
    assert found["fp16"].reason == '"addmm" not implemented for Half'
    assert found["fp32"].num_rounds == 5


def test_a_call_that_cannot_run_in_fp32_is_not_tried_low():
    bench = Bench()

    def missing():
        raise NotImplementedError

    found = bench.times(fp32=bench.maker("fp32", missing), bf16=bench.maker("bf16", 0.01))
    assert list(found) == ["fp32"]
    assert found["fp32"].reason == "NotImplementedError"


def test_rounds_end_with_the_allowance_but_not_before_the_fewest():
    bench = Bench()
    found = bench.times(Limits(min_rounds=2, max_rounds=50), allowance_s=3500.0, fp32=bench.maker("fp32", 0.01))
    assert found["fp32"].num_rounds == 4  # each takes a little over 1000 s with its preparation
    found = bench.times(Limits(min_rounds=2, max_rounds=50), allowance_s=0.0, fp32=bench.maker("fp32", 0.01))
    assert found["fp32"].num_rounds == 2


def test_a_clock_that_does_not_move_gives_no_zero_to_divide_by():
    bench = Bench()
    found = bench.times(fp32=bench.maker("fp32", 0.0), bf16=bench.maker("bf16", 0.0))
    assert 0 < found["bf16"].total_s < 1e-8
