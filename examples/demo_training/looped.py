"""Ouro (Zhu et al. 2025, arXiv 2510.25741) at the demo's size: a few layers that run in loops, and a gate that ends them.

Beside a Llama's layers, those of Ouro norm each branch a second time before they add it. A loop ends with the final norm, whose
output is the next loop's input, the head's and the gate's.

Loss: the last loop's, plus `loop_weight` times the mean of the earlier ones', whose targets are in part the last loop's own
distribution (`distillation`): a loop that is left early shall choose what the last one would. The gate learns as in the paper's
second stage, from states that it does not change: to go on where the next loop lowers the token's loss.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tide_export.model.looped_models import OuroConfig, OuroForCausalLM

from .model import BRANCH_NORMS, LAYER_WEIGHTS, StackedLlama, attention_branch, head_logits, mlp_branch, rms_norm
from .variants import Variant

# Of the paper, section 3.4: the label to go on is sigmoid(STEEPNESS · (gain - MIN_GAIN)), gain in nats of the token.
STEEPNESS, MIN_GAIN = 50.0, 0.005
STEADINESS = 2.0  # without it the last loop of a grown model begins at 7 nats a token
GATE = "model.early_exit_gate"


def token_losses(x: Tensor, targets: Tensor, norm: Tensor, embedding: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Loss of every token `[B, S]` in nats, and the log-probabilities `[B, S, V]`, of the head on `x` `[B, S, H]`."""
    log_probs = head_logits(x, norm, embedding, eps).float().log_softmax(-1)
    return -log_probs.gather(-1, targets[..., None])[..., 0], log_probs


def taught_losses(
    x: Tensor, targets: Tensor, teacher: Tensor, norm: Tensor, embedding: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Loss of every token `[B, S]` against the text, and against the probabilities `teacher` `[B, S, V]`."""
    nats, log_probs = token_losses(x, targets, norm, embedding, eps)
    return nats, -(teacher * log_probs).sum(-1)


def mean_size(branch: Tensor) -> Tensor:
    """Mean root mean square of vectors `[..., H]`."""
    return branch.square().mean(-1).sqrt().mean()


class StackedOuro(StackedLlama):
    """An Ouro model with tied embeddings: `StackedLlama` in loops, with norms behind the branches and a gate."""

    config: OuroConfig
    attention_norm_2: Tensor
    mlp_norm_2: Tensor
    exit_gate: Tensor
    exit_gate_bias: Tensor
    run_token_losses: Callable[..., tuple[Tensor, Tensor]]
    run_taught_losses: Callable[..., tuple[Tensor, Tensor]]
    hf_class: ClassVar[type[LlamaForCausalLM]] = OuroForCausalLM
    layer_names: ClassVar[dict[str, str]] = LAYER_WEIGHTS | BRANCH_NORMS

    def __init__(self, config: OuroConfig, compute: torch.dtype = torch.bfloat16, compiled: bool = False):
        if config.loops < 2:
            raise ValueError(f"a looped demo model needs 2 loops or more, config.json has {config.loops}")
        super().__init__(config, compute, compiled)
        for name in BRANCH_NORMS:
            self.register_parameter(name, nn.Parameter(torch.ones(config.num_hidden_layers, config.hidden_size)))
        self.exit_gate = nn.Parameter(torch.zeros(1, config.hidden_size))
        self.exit_gate_bias = nn.Parameter(torch.zeros(1))
        self.run_token_losses, self.run_taught_losses = token_losses, taught_losses
        if compiled:
            self.run_token_losses = torch.compile(token_losses, dynamic=False)
            self.run_taught_losses = torch.compile(taught_losses, dynamic=False)

    @property
    def loops(self) -> int:
        return self.config.loops

    @property
    def exit_depths(self) -> list[int]:
        """The ends of all loops but the last."""
        return [loop * self.config.num_hidden_layers for loop in range(1, self.loops)]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw fresh weights; what a layer adds starts at zero by the gain behind its branch."""
        super().initialize(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for weight in (self.output, self.down):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5 * weight.shape[-1] ** -0.5)
        for name in BRANCH_NORMS:
            self.get_parameter(name).zero_()

    @torch.no_grad()
    def grow_from(self, llama: StackedLlama, ids: Tensor) -> None:
        """Start from a Llama's embedding, final norm and first layers, so that the first loop is the Llama cut off there.

        The gains behind the branches become their mean sizes on the tokens `ids` `[B, S]`. What the first loop adds up is then
        made `STEADINESS` times smaller, and the final norm as much larger: the first loop predicts the same, and a later one,
        which reads the final norm, changes little at first. Raises ValueError where widths differ or the Llama has fewer layers.
        """
        layers = self.config.num_hidden_layers
        shared = dict(llama.named_parameters())
        if llama.config.num_hidden_layers < layers or llama.embedding.shape != self.embedding.shape:
            raise ValueError(f"the warm start needs {layers} layers or more, and embeddings {list(self.embedding.shape)}")
        for name, weight in self.named_parameters():
            if name in shared:
                weight.copy_(shared[name][:layers] if name in LAYER_WEIGHTS else shared[name])
        tables = llama.tables(ids.shape[1])
        eps = self.config.rms_norm_eps
        x = F.embedding(ids, llama.embedding.to(llama.compute)).float()
        for number, layer in enumerate(llama.layer_weights()[:layers]):
            attended = attention_branch(x, layer, tables, eps).float()
            self.attention_norm_2[number] = mean_size(attended)
            x = x + attended
            computed = mlp_branch(x, layer, eps).float()
            self.mlp_norm_2[number] = mean_size(computed)
            x = x + computed
        for small in (self.embedding, self.attention_norm_2, self.mlp_norm_2):
            small.div_(STEADINESS)
        self.final_norm.mul_(STEADINESS)

    def training_loss(self, ids: Tensor, variant: Variant, generator: torch.Generator) -> tuple[Tensor, float]:
        """See the top of this file; nothing is drawn."""
        inputs = ids[:, :-1].contiguous()
        targets = ids[:, 1:].contiguous()
        head = self.final_norm.to(self.compute), self.embedding.to(self.compute), self.config.rms_norm_eps
        states = self.hidden_states(inputs, [*self.exit_depths, self.depth])
        last, log_probs = self.run_token_losses(states[self.depth], targets, *head)
        teacher = log_probs.detach().exp()
        early = [self.run_taught_losses(states[depth], targets, teacher, *head) for depth in self.exit_depths]
        share = variant.distillation
        taught = [(1 - share) * text.mean() + share * soft.mean() for text, soft in early]
        gate = self.gate_loss([states[depth] for depth in self.exit_depths], [*(text for text, _ in early), last])
        total = last.mean() + variant.loop_weight * torch.stack(taught).mean() + gate
        return total, last.mean().item()

    def gate_loss(self, states: list[Tensor], losses: list[Tensor]) -> Tensor:
        """Binary cross-entropy of the gate after each loop but the last; `losses` of all loops, `[B, S]` each."""
        nats = torch.stack(losses).detach()
        stay = torch.sigmoid(STEEPNESS * ((nats[:-1] - nats[1:]).clamp(min=0) - MIN_GAIN))
        normed = rms_norm(torch.stack(states).detach(), self.final_norm.detach(), self.config.rms_norm_eps)
        leave = F.linear(normed, self.exit_gate, self.exit_gate_bias)[..., 0]
        return F.binary_cross_entropy_with_logits(leave, 1 - stay)

    def to_hf(self) -> dict[str, Tensor]:
        gate = {f"{GATE}.weight": self.exit_gate, f"{GATE}.bias": self.exit_gate_bias}
        return super().to_hf() | {name: weight.detach().clone() for name, weight in gate.items()}

    @torch.no_grad()
    def load_hf(self, state: dict[str, Any]) -> None:
        super().load_hf(state)
        self.exit_gate.copy_(state[f"{GATE}.weight"])
        self.exit_gate_bias.copy_(state[f"{GATE}.bias"])
