"""The fused step of cut parameters on a GPU: the codes and scales of whole ones on the CPU."""

import pytest
import torch

from tests.optim.test_cut import SCALED, Meeting, ranks_of, step, whole_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recipe", SCALED)
def test_codes_and_scales_of_a_cut_parameter_are_those_of_the_whole(
    recipe: str, offload: bool
) -> None:
    meeting = Meeting()
    parts = ranks_of(recipe, meeting, device="cuda", offload=offload, piece=256)
    whole = whole_of(recipe)
    for seed in range(4):
        step(parts, whole, seed)
    assert meeting.calls == 4
    weight = torch.cat([p.shards[0].weight for p in parts]).cpu()
    assert torch.equal(weight, whole.shards[0].weight)
    for name, tensor in whole.states[0].items():
        found = torch.cat([p.states[0][name] for p in parts]).cpu()
        assert torch.equal(found, tensor), name
