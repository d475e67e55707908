"""`trace`: the formats in which the kernels of every site really ran, held against the policy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autoprec.errors import TraceError
from autoprec.graph.site import Site
from autoprec.policy import Policy
from autoprec.runtime.kernels import Kernel
from autoprec.runtime.one_step import Loss, watch_step
from autoprec.runtime.precision import Precision
from autoprec.runtime.site_call import SiteCall
from autoprec.runtime.verdict import Judgement, Verdict, judge

SCHEMA = 1
_MAX_NAMED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteTrace:
    """What one site was asked and what ran, over all its calls in the step.

    `asked` and `rule` (the index of the rule that won) come from the policy. `kernels` and `backward_kernels` hold each
    different kernel once, in order; every matmul of the backward is among the latter. Several calls of one site have
    the worst of their verdicts. `emulated`: the numbers are those of the format, the kernels and their times are not.
    """

    site: Site
    asked: str
    rule: int
    verdict: Verdict
    reason: str
    num_calls: int
    kernels: tuple[Kernel, ...]
    backward_kernels: tuple[Kernel, ...]
    emulated: bool = False

    @property
    def honored(self) -> bool:
        """Return whether the site ran as asked."""
        return self.verdict == "honored"

    @property
    def ran(self) -> tuple[str, ...]:
        """Return the formats that entered the kernels of the forward, each once; of matmuls alone where there are."""
        return _formats(self.kernels)

    @property
    def ran_backward(self) -> tuple[str, ...]:
        """Return the formats that entered the kernels of the backward, as `ran` does."""
        return _formats(self.backward_kernels)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Every site of one step in the order in which they ran; `str()` is a table for people."""

    policy: Policy
    rows: tuple[SiteTrace, ...]

    @property
    def dishonored(self) -> tuple[SiteTrace, ...]:
        """Return the sites that did not run as the policy asked, and for no reason that its semantics allow."""
        return tuple(row for row in self.rows if row.verdict == "dishonored")

    @property
    def exempt(self) -> tuple[SiteTrace, ...]:
        """Return the sites that ran otherwise for a reason that the semantics of policies state."""
        return tuple(row for row in self.rows if row.verdict == "exempt")

    def check(self) -> None:
        """Return if every rule was honored.

        Raises: `TraceError` otherwise, with the first sites, what was asked of them, what ran and what to do.
        """
        found = self.dishonored
        if not found:
            return
        lines = [f"  {_said(row, self.policy)}" for row in found[:_MAX_NAMED]]
        if len(found) > _MAX_NAMED:
            lines.append(f"  and {len(found) - _MAX_NAMED} more; print(trace) shows all")
        sites = "1 site was" if len(found) == 1 else f"{len(found)} sites were"
        raise TraceError(
            f'policy "{self.policy.name}": {sites} not honored\n' + "\n".join(lines) + "\n"
            "do what the reasons say; where a kernel has no such format, give the site a rule of its own ahead of the "
            "one that won, with the format that ran or as_given"
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the trace as JSON holds it."""
        return {
            "schema_version": SCHEMA,
            "policy": self.policy.name,
            "num_sites": len(self.rows),
            "num_exempt": len(self.exempt),
            "num_dishonored": len(self.dishonored),
            "sites": [_plain(row) for row in self.rows],
        }

    def __str__(self) -> str:
        counts = f"{len(self.rows)} sites, {len(self.exempt)} exempt, {len(self.dishonored)} dishonored"
        lines = _table(self.rows) if self.rows else []
        return "\n".join([f'What ran under policy "{self.policy.name}": {counts}', *lines])


def trace(precision: Precision, batch: Any, loss: Loss | None = None) -> Trace:
    """Return in which formats one step of the model on `batch` really runs, forward and backward.

    `loss(model, batch)` returns a scalar and runs as in `precision.loss()`. Left out, the model is called with the
    batch (a mapping as keywords, a tuple or list as arguments) and its `.loss`, or the sum of what it returns, is used.

    The step changes no gradient, buffer, random state or training flag, and steps no optimizer; plain attributes that
    `forward` changes stay changed, and hooks of the model run. With FSDP every rank must trace. Under observation some
    functions take another path through torch (fused inference kernels, formulas for tensor subclasses), which may
    differ in the last bit but not in the format.

    Raises: `TraceError` if the model is compiled or there is nothing to go backward from.
    """
    watch = watch_step("trace", precision, batch, loss)
    return Trace(policy=precision.policy, rows=_rows(watch.calls, precision.policy))


def _rows(calls: Iterable[SiteCall], policy: Policy) -> tuple[SiteTrace, ...]:
    by_site: dict[Site, list[SiteCall]] = {}
    for call in calls:
        by_site.setdefault(call.site, []).append(call)
    return tuple(_row(site, group, policy) for site, group in by_site.items())


def _row(site: Site, calls: list[SiteCall], policy: Policy) -> SiteTrace:
    asked, rule = policy.format_of(site)
    judgements = [judge(call, asked, policy.float32_matmul) for call in calls]
    worst = _worst(judgements)
    return SiteTrace(
        site=site,
        asked=asked,
        rule=rule,
        verdict=worst.verdict,
        reason=worst.reason,
        num_calls=len(calls),
        kernels=tuple(dict.fromkeys(kernel for call in calls for kernel in call.forward)),
        backward_kernels=tuple(dict.fromkeys(kernel for call in calls for kernel in call.backward)),
        emulated=any(call.is_emulated for call in calls),
    )


def _worst(judgements: list[Judgement]) -> Judgement:
    order: tuple[Verdict, ...] = ("dishonored", "exempt", "honored")
    return min(judgements, key=lambda judgement: order.index(judgement.verdict))


def _formats(kernels: tuple[Kernel, ...]) -> tuple[str, ...]:
    matmuls = [kernel for kernel in kernels if kernel.is_matmul]
    return tuple(dict.fromkeys(name for kernel in matmuls or kernels for name in kernel.formats))


def _said(row: SiteTrace, policy: Policy) -> str:
    rule = f'rule {row.rule + 1} "{policy.rules[row.rule].sites}" asked {row.asked}'
    ran = f"ran {_joined(row.ran)} forward, {_joined(row.ran_backward)} backward"
    return f"{row.site}: {rule}; {ran}: {row.reason}"


def _joined(names: tuple[str, ...]) -> str:
    return "+".join(names) or "-"


def _plain(row: SiteTrace) -> dict[str, Any]:
    return {
        "site": str(row.site),
        "asked": row.asked,
        "rule": row.rule,
        "ran": list(row.ran),
        "ran_backward": list(row.ran_backward),
        "verdict": row.verdict,
        "reason": row.reason,
        "emulated": row.emulated,
        "num_calls": row.num_calls,
        "kernels": [str(kernel) for kernel in row.kernels],
        "backward_kernels": [str(kernel) for kernel in row.backward_kernels],
    }


def _table(rows: tuple[SiteTrace, ...]) -> list[str]:
    cells = [("site", "rule", "asked", "forward", "backward", "verdict")]
    cells += [
        (
            str(row.site),
            str(row.rule + 1),
            row.asked,
            _joined(row.ran),
            _joined(row.ran_backward),
            "emulated" if row.emulated and row.honored else row.verdict if not row.honored else "",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    reasons = ["", *(f": {row.reason}" if row.reason else "" for row in rows)]
    return [f"{line.rstrip()}{reason}" for line, reason in zip(lines, reasons, strict=True)]
