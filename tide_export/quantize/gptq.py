"""GPTQ (Frantar et al. 2023, arXiv 2210.17323): quantise column by column; later columns make up for the rounding errors.

It is written here because ONNX Runtime's `gptq_quantize` reads the inputs of the model that is not quantised yet and rounds its
result a second time to other scales, while gptqmodel and llmcompressor require other releases of torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from tide_runtime.errors import DataError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_export.documents import Note, load_documents
from tide_export.sources.source_tokenizer import prompt_prefix
from tide_export.weights.quantized_weight import QuantizedWeight

DAMPING = 0.01  # multiple of the mean of the Hessian's diagonal; section 3.3 of the paper
SHARES_OF_RANGE = tuple(1 - 0.025 * step for step in range(20))
WINDOW = 512  # tokens that the model reads from an empty cache
MAX_TOKENS = 32 * WINDOW


def visit_inputs(
    model: PreTrainedModel,
    modules: Mapping[str, nn.Module],
    tokens: Tensor,
    visit: Callable[[str, Tensor], None],
    loops: int = 1,
) -> None:
    """Run ``model`` on ``tokens`` [B, T] once; call ``visit`` with name and X^T X [K, K] before a module computes with X.

    All windows run together, so what ``visit`` writes into the module's matrix changes the inputs of all later modules. In
    several ``loops`` a module computes with several X, the later of which depend on every matrix: all modules are visited after
    the pass, with the sum over its loops.

    Each name is visited at most once. Modules that the tokens do not reach, as an expert of a mixture may be, are not visited.
    """

    def reach(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if loops == 1 and name not in left:
                return
            left.discard(name)
            rows = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            if loops == 1:
                visit(name, rows.T @ rows)
            else:
                sums[name] = torch.addmm(sums[name], rows.T, rows) if name in sums else rows.T @ rows

        return hook

    left = set(modules)
    sums = dict[str, Tensor]()
    with ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(reach(name)).remove)
        model.base_model(input_ids=tokens, use_cache=False)
    for name in modules:
        if name in sums:
            visit(name, sums.pop(name))


def gptq(matrix: Tensor, gram: Tensor, bits: int, block_size: int) -> QuantizedWeight:
    """``matrix`` [N, K] in blocks of ``block_size`` columns with scale and zero point, K a multiple of it.

    ``gram``: X^T X [K, K] of the inputs X, half the Hessian of the squared error of X · matrix^T. Algorithm 1 of the paper, with
    groups of the blocks' size: the scale of a block is chosen when the errors of all columns before it have been moved.
    """
    columns = matrix.float().T.clone()  # [K, N]: a column of the matrix is one run of memory
    values = torch.empty_like(columns, dtype=torch.uint8)
    scales = []
    zeros = []
    factor = _inverse_factor(gram)
    for start in range(0, len(columns), block_size):
        end = start + block_size
        block = columns[start:end]
        ahead = factor[start:end]
        scale, zero = _scale_and_zero(block, ahead[:, start:end].diagonal(), bits)
        errors = torch.empty_like(block)
        for k in range(block_size):
            rounded = _rounded(block[k], scale, zero, bits)
            values[start + k] = rounded
            errors[k] = (block[k] - (rounded - zero) * scale) / ahead[k, start + k]
            block[k + 1 :] -= torch.outer(ahead[k, start + k + 1 : end], errors[k])
        columns[end:] -= ahead[:, end:].T @ errors
        scales.append(scale)
        zeros.append(zero)
    return QuantizedWeight(
        bits,
        values.T.contiguous().numpy(),
        torch.stack(scales, 1).numpy(),
        torch.stack(zeros, 1).to(torch.uint8).numpy(),
        origin=f"int{bits} gptq",
    )


def _scale_and_zero(block: Tensor, divisors: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point [N] of ``block`` [S, N], from the range of its values and narrower ones, which cut the ends off.

    The least error wins; that of each column counts as in the paper's loss, divided by ``divisors`` [S] before it is squared.
    """
    low = block.amin(0).clamp(max=0)
    high = block.amax(0).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    scale, zero = torch.empty_like(low), torch.empty_like(low)
    for share in SHARES_OF_RANGE:
        tried = torch.where(high > low, share * (high - low) / (2**bits - 1), 1.0)
        tried_zero = torch.round(-share * low / tried)
        errors = block - (_rounded(block, tried, tried_zero, bits) - tried_zero) * tried
        loss = (errors / divisors[:, None]).square().sum(0)
        better = loss < best
        best, scale, zero = (torch.where(better, *pair) for pair in ((loss, best), (tried, scale), (tried_zero, zero)))
    return scale, zero


def _rounded(values: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return torch.round(values / scale + zero).clamp(0, 2**bits - 1)


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor [K, K] of the inverse of the damped ``gram``."""
    damped = gram.to(torch.float64, copy=True)
    diagonal = damped.diagonal()
    damping = DAMPING * diagonal.mean()
    diagonal += damping if damping > 0 else 1  # an expert whose inputs were all 0 is rounded to nearest
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()


def calibration_tokens(source: str, tokenizer: FastTokenizer | None, positions: int | None, note: Note) -> torch.Tensor:
    """Windows [N, T] of token ids, evenly spaced over the text in ``source``: up to MAX_TOKENS in all, T = WINDOW.

    Each begins with the special tokens of a prompt.

    Args:
        source: as `load_documents` takes it, and ``note``.
        positions: of the model; T where it is less. None: any number.

    Raises DataError if the text is missing, unreadable or shorter than a window, or the model has no tokenizer.
    """
    if tokenizer is None:
        raise DataError("the model has no fast tokenizer (tokenizer.json), so text cannot be cut into its tokens; add one")
    encoded = (tokenizer(d.text, add_special_tokens=False, verbose=False) for d in load_documents(source, note))
    ids = [token for text in encoded for token in text["input_ids"]]
    window = min(WINDOW, positions or WINDOW)
    whole = len(ids) // window
    if not whole:
        raise DataError(
            f"{source} has {len(ids)} tokens, and gptq needs at least {window}; give more text, best {MAX_TOKENS} tokens"
        )
    count = min(whole, MAX_TOKENS // window)
    starts = [window * (i * whole // count) for i in range(count)]
    prefix = prompt_prefix(tokenizer)
    return torch.tensor([[*prefix, *ids[start : start + window]][:window] for start in starts])
