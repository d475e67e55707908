"""Low parameters under DistributedDataParallel, on two gloo ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group

from autoprec.errors import ApplyError
from autoprec.runtime import apply
from tests.unit.runtime.storing import MASTER, STOCHASTIC, batch, net, same, storing, weights


def _refused(model: nn.Module) -> str:
    """Return what a training step in DistributedDataParallel is refused with."""
    parallel = nn.parallel.DistributedDataParallel(model)
    try:
        parallel(batch(0)).square().mean().backward()
    except ApplyError as error:
        return str(error)
    return ""


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, settings in (("master", MASTER), ("stochastic", STOCHASTIC)):
        model = net()
        apply(model, storing(**settings, gradients="storage"))
        parallel = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            parallel(batch(10 * step + rank)).square().mean().backward()
            optimizer.step()
        torch.save([*weights(model), *(p.grad for p in model.parameters())], f"{folder}/{name}{rank}.pt")
    model = net()
    apply(model, storing(**MASTER))
    refused = _refused(model)
    model(batch(0)).square().mean().backward()  # by itself it trains
    (Path(folder) / f"refused{rank}.txt").write_text(refused, encoding="utf-8")
    destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own on process groups
def test_ranks_that_see_other_data_keep_equal_weights(tmp_path: Path) -> None:
    """Gradients are averaged in every step, not only before the first one, and replicas round alike."""
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    for name in ("master", "stochastic"):
        one, two = (torch.load(tmp_path / f"{name}{rank}.pt") for rank in range(2))
        assert same(one, two)
    refused = (tmp_path / "refused0.txt").read_text(encoding="utf-8")
    assert "accumulates their gradients in fp32, and DistributedDataParallel reduces gradients in the dtype" in refused
    assert "add gradients: storage to the policy's parameters" in refused
