"""Attention and recurrent layers of torch, written out as linear layers whose gradients of examples are known.

Each is one function of torch that takes all weights of its layer. What takes its place here computes the same, and
passes `record` the output, the input and the parameters of each linear layer within, examples first.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Record = Callable[..., Tensor]  # output, input, weight, bias, [their rows] -> output


class UnknownUse(RuntimeError):
    """Raised if a layer or parameter is used in a way that by_layers does not support."""


def attention(record: Record, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return what torch.nn.functional.multi_head_attention_forward does, for inputs [positions, n, size].
    UnknownUse for what it does not cover."""
    use = SimpleNamespace(**SIGNATURE.bind(*args, **kwargs).arguments)
    weight, bias, size = use.in_proj_weight, use.in_proj_bias, use.embed_dim_to_check
    mask, padding = use.attn_mask, use.key_padding_mask  # which nn.MultiheadAttention has made numbers to be added
    if weight is None or use.bias_k is not None or use.add_zero_attn or (use.dropout_p and use.training):
        raise UnknownUse("kdim, vdim, add_bias_kv, add_zero_attn or dropout")
    if use.query.dim() != 3 or any(part is not None and part.dtype == torch.bool for part in (mask, padding)):
        raise UnknownUse("no batch, or masks of bool")

    # query, key and value are one linear layer if their input is the same
    def projected(x: Tensor, part: slice) -> Tensor:
        x = x.transpose(0, 1)
        output = functional.linear(x, weight[part], bias if bias is None else bias[part])
        return record(output, x, weight, bias, part)

    inputs = (use.query, use.key, use.value)
    if use.query is use.key is use.value:
        parts = projected(use.query, slice(None)).chunk(3, -1)
    else:
        parts = tuple(projected(x, slice(i * size, (i + 1) * size)) for i, x in enumerate(inputs))
    q, k, v = (part.unflatten(-1, (use.num_heads, -1)).transpose(1, 2) for part in parts)  # [n, heads, positions, each]

    # one mask for both kinds, to be broadcast to [n, heads, positions, positions]
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, use.num_heads))
    if padding is not None:
        mask = padding[:, None, None] + (0 if mask is None else mask)

    weights = None
    if use.need_weights:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if use.average_attn_weights else weights
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask)
    mixed = mixed.transpose(1, 2).flatten(2)
    output = functional.linear(mixed, use.out_proj_weight, use.out_proj_bias)
    return record(output, mixed, use.out_proj_weight, use.out_proj_bias).transpose(0, 1), weights


SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def recurrent(kind: str, record: Record, x: Tensor, state: Any, weights: Any, *settings: Any) -> tuple[Tensor, ...]:
    """Return what torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu do, as `kind` says. state: [layers *
    directions, n, size], of an LSTM two of them. UnknownUse for what it does not cover."""
    biases, layers, dropout, training, bidirectional, batch_first = (*settings, False)[:6]
    directions = 2 if bidirectional else 1
    each = 4 if biases else 2
    if not isinstance(weights, list) or len(weights) != layers * directions * each or (dropout and training):
        raise UnknownUse("packed sequences, proj_size or dropout")

    x = x if batch_first else x.transpose(0, 1)
    states = state if kind == "lstm" else (state,)
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(layer * directions, (layer + 1) * directions):
            backward = direction % directions == 1
            parameters = (*weights[direction * each : (direction + 1) * each], None, None)[:4]
            start = [part[direction] for part in states]
            hidden, final = scan(kind, record, x.flip(1) if backward else x, start, *parameters)
            outputs.append(hidden.flip(1) if backward else hidden)
            last.append(final)
        x = torch.cat(outputs, -1)
    return (x if batch_first else x.transpose(0, 1), *(torch.stack(parts) for parts in zip(*last, strict=True)))


def scan(
    kind: str,
    record: Record,
    x: Tensor,  # [n, steps, inputs]
    state: list[Tensor],  # each [n, size]
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs [n, steps, size] of one layer in one direction, and its last state."""
    inputs = record(functional.linear(x, weight, bias), x, weight, bias)

    # of a GRU alone, the gradient of what comes from the hidden state is another than that of what comes from the input
    start = inputs if kind != "gru" else torch.zeros_like(inputs, requires_grad=True)
    hiddens = start if hidden_bias is None else start + hidden_bias
    h, outputs = state[0], [state[0]]
    for from_input, to_add in zip(inputs.unbind(1), hiddens.unbind(1), strict=True):
        gates = torch.addmm(to_add, h, hidden_weight.T)
        if kind == "lstm":
            i, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            state = [h, c]
        elif kind == "gru":
            r, z, new = from_input.chunk(3, 1)
            r_hidden, z_hidden, new_hidden = gates.chunk(3, 1)
            new = torch.tanh(new + torch.sigmoid(r + r_hidden) * new_hidden)
            h = new + torch.sigmoid(z + z_hidden) * (h - new)
        else:
            h = torch.tanh(gates) if kind == "rnn_tanh" else torch.relu(gates)
        outputs.append(h)

    hidden = torch.stack(outputs, 1)
    record(start, hidden[:, :-1], hidden_weight, hidden_bias)
    return hidden[:, 1:], [h, *state[1:]]


SEQUENCES: dict[str, Callable[..., Any]] = {  # by the name of the function of torch
    "multi_head_attention_forward": attention,
    **{kind: partial(recurrent, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}
