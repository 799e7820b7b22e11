"""What a model makes of keys of the configuration that no layer reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.model.shapes import config

pytestmark = pytest.mark.usefixtures("megatron")
VOCAB = 64


def build(z_loss: float) -> nn.Module:
    """A small model; its weights are the same for every `z_loss`."""
    from megatron.core import parallel_state

    from coatlm.model.builder import build_model
    from coatlm.parallel.groups import make_groups

    parallel_state.destroy_model_parallel()
    torch.manual_seed(0)
    sizes = {"layers": 1, "hidden": 64, "heads": 2, "ffn": 96}
    c = config(sizes, seq_len=16, precision={"recipe": "fp32"}, train={"z_loss": z_loss})
    (model,) = build_model(c, make_groups(c.parallel), VOCAB)
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("z_loss", [0.0, 0.25])
def test_the_z_loss_of_the_configuration_is_trained_on_and_not_evaluated(
    z_loss: float, tokens: Tensor
) -> None:
    model, ids, labels = build(z_loss), tokens[:, :-1], tokens[:, 1:]
    hidden: list[Tensor] = []
    model.decoder.register_forward_hook(lambda *call: hidden.append(call[-1]))
    evaluated = model.eval()(ids, labels)
    logits = (hidden[0] @ model.output_layer.weight.t()).transpose(0, 1)
    plain = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(evaluated, plain)
    wanted = plain + z_loss * logits.logsumexp(-1) ** 2
    trained = model.train()(ids, labels)
    torch.testing.assert_close(trained, wanted)
    weights = list(model.parameters())
    found = torch.autograd.grad(trained.sum(), weights)
    torch.testing.assert_close(found, torch.autograd.grad(wanted.sum(), weights))
