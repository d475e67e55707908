"""A small transformer as the search sees it, by hand: two blocks, a head and a loss."""

from autoprec.analysis import Mark, Reason, ReasonCode, Verdict
from autoprec.graph.layers import Layer
from autoprec.graph.site import Site
from autoprec.search.choices import Dimension, dimensions
from autoprec.search.layout import Layout, layout_of
from autoprec.search.space import Space

SPACE = Space(
    low=("bf16", "fp16"),
    prefer=("*:softmax", "*:layer_norm"),
    float32_matmul=("ieee", "tf32"),
    loss_scale_initial=(1024.0, 65536.0),
    loss_scale_growth_interval=(50, 200),
)


def site(text: str) -> Site:
    """Return the site that `text` names."""
    return Site.parse(text)


BLOCK = (
    "blocks.{}.attn:matmul#0",
    "blocks.{}.attn:softmax#0",
    "blocks.{}.attn:matmul#1",
    "blocks.{}.norm:layer_norm#0",
)
SITES = (
    *(site(text.format(number)) for number in (0, 1) for text in (*BLOCK, "blocks.{}.attn.proj:linear#0")),
    site("head:linear#0"),
    site("head:conv2d#0"),
    site(":mul#0"),
    site("@loss:cross_entropy#0"),
)
PREFER = {"softmax": "saturates", "layer_norm": "long sums", "cross_entropy": "logs"}
LAYERS = tuple(
    Layer(
        name=module,
        pattern=module.replace("0", "*").replace("1", "*"),
        sites=tuple(s for s in SITES if s.module == module),
    )
    for module in dict.fromkeys(site.module for site in SITES)
)


def mark(where: Site, low: str, verdict: Verdict, detail: str = "") -> Mark:
    """Return a mark; `detail` is its reason."""
    reasons = (Reason(code=ReasonCode.DENY_OP, detail=detail),) if detail else ()
    return Mark(site=where, format=low, verdict=verdict, reasons=reasons)


MARKS = tuple(
    mark(each, low, "prefer" if each.op in PREFER else "free", PREFER.get(each.op, ""))
    for each in SITES
    for low in ("bf16", "fp16")
)


def layout(space: Space = SPACE, extra: tuple[Mark, ...] = ()) -> Layout:
    """Return the layout of the small transformer."""
    return layout_of((*MARKS, *extra), LAYERS, space)


def rows(space: Space = SPACE) -> tuple[Dimension, ...]:
    """Return the dimensions of the small transformer."""
    return dimensions(space, layout(space))
