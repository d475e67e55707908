from autoprec.runtime.guard.ladder import Ladder

ALL = ("warn", "promote", "fallback", "restore", "stop")


def climbed(ladder, steps, can=lambda reaction: True, reactions=ALL):
    return [ladder.climb("flush", reactions, step, can) for step in steps]


def test_reactions_come_in_order_and_promoting_as_long_as_it_can():
    left = {"promote": 2, "restore": 2}

    def can(reaction):
        left[reaction] = left.get(reaction, 99) - 1
        return left[reaction] >= 0

    assert climbed(Ladder(ALL, 10), range(8), can) == [
        "warn", "promote", "promote", "fallback", "restore", "restore", "stop", "stop"
    ]  # fmt: skip


def test_what_cannot_be_taken_is_passed_over():
    assert climbed(Ladder(ALL, 10), range(3), lambda reaction: reaction not in ("promote", "fallback")) == [
        "warn", "restore", "restore"
    ]  # fmt: skip


def test_only_allowed_reactions_and_then_warnings():
    assert climbed(Ladder(("promote",), 10), range(3), lambda reaction: reaction != "stop") == ["promote"] * 3
    assert climbed(Ladder((), 10), range(2)) == ["warn", "warn"]


def test_a_calm_begins_anew():
    ladder = Ladder(ALL, 10)
    assert climbed(ladder, (1, 2, 12, 23, 24), lambda reaction: reaction != "promote") == [
        "warn", "fallback", "restore", "warn", "fallback"
    ]  # fmt: skip
    assert not ladder.is_calm(34)
    assert ladder.is_calm(35)
    assert Ladder(ALL, 10).is_calm(0)


def test_warnings_given_elsewhere_are_not_given_again():
    ladder = Ladder(ALL, 10)
    assert ladder.climb("flush", ALL, 1, lambda reaction: reaction != "promote", warned=True) == "fallback"
    assert ladder.climb("flush", ALL, 2, lambda reaction: True, warned=True) == "restore"
    assert Ladder(ALL, 10).climb("ranks", ("restore", "stop"), 1, lambda reaction: True, warned=True) == "restore"


def test_it_goes_on_where_it_was():
    ladder, again = Ladder(ALL, 10), Ladder(ALL, 10)
    climbed(ladder, (1, 2), lambda reaction: reaction != "promote")
    again.load_state_dict(ladder.state_dict())
    assert climbed(again, (3,)) == ["restore"]
    assert climbed(ladder, (3,)) == ["restore"]
