"""Kernels in Triton for MLP experts; triton_experts.py launches them and names their arguments.

Widths are constants, so a kernel is compiled per layer size: depths that are multiples of a step
need no mask. M, N and K are a program's rows, columns and depth of a step. Operands in fp32 are
split into three TF32 products; others ignore ``input_precision``.
"""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]


@triton.jit
def _locate_program_tile(tiles, width: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return a program's expert, first row, end of its rows, row and column numbers, and mask."""
    # Offsets of a tile's entries count from its first row and fit 32 bits: with 64 bits for each
    # entry, registers are spilled.
    tile = tiles + 3 * (tl.program_id(0) // tl.cdiv(width, N))
    first = tl.load(tile + 1).to(tl.int64)
    row = first.to(tl.int32) + tl.arange(0, M)
    column = (tl.program_id(0) % tl.cdiv(width, N)) * N + tl.arange(0, N)
    return tl.load(tile).to(tl.int64), first, tl.load(tile + 2), row, column, column < width


@triton.jit
def _multiply_tile(lhs, is_row, rhs, is_column, step, D: tl.constexpr, K: tl.constexpr):
    """Return rows · columns of one expert's weight over D, fp32; pointers: to the first K of D."""
    total = tl.zeros((lhs.shape[0], rhs.shape[1]), tl.float32)
    for start in range(0, D, K):
        if D % K == 0:
            values = tl.load(lhs, mask=is_row[:, None], other=0)
            part = tl.load(rhs, mask=is_column[None, :], other=0)
        else:
            is_place = start + tl.arange(0, K) < D
            values = tl.load(lhs, mask=is_row[:, None] & is_place[None, :], other=0)
            part = tl.load(rhs, mask=is_place[:, None] & is_column[None, :], other=0)
        total = tl.dot(values, part, total, input_precision="tf32x3")
        lhs += K
        rhs += step
    return total


@triton.jit
def multiply_and_activate(
    values,
    sources,
    weight,
    bias,
    inner,
    output,
    row_stride,
    column_stride,
    tiles,
    D: tl.constexpr,
    O: tl.constexpr,
    ACTIVATION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiply rows by their experts' weights, add biases, and apply an activation.

    ACTIVATION: none, gelu (erf form), or swiglu, whose weight has 2·O columns, the gate's first.
    Unless None, ``sources`` picks the rows of ``values``, and ``inner`` gets preactivations.
    """
    expert, first, end, row, column, is_column = _locate_program_tile(tiles, O, M, N)
    if first >= end:  # an unused tile
        return
    is_row = row < end
    source = row.to(tl.int64)
    if sources is not None:
        source = tl.load(sources + row, mask=is_row, other=0)
    width: tl.constexpr = 2 * O if ACTIVATION == "swiglu" else O
    place = tl.arange(0, K)
    lhs_at = values + source[:, None] * D + place[None, :]
    weight_at = weight + expert * D * width
    weight_at += place[:, None] * row_stride + column[None, :] * column_stride
    step = K * row_stride
    total = _multiply_tile(lhs_at, is_row, weight_at, is_column, step, D, K)
    if bias is not None:
        total += tl.load(bias + expert * O + column, mask=is_column, other=0).to(tl.float32)[None]
    place = tl.arange(0, M)[:, None] * width + column[None, :]
    is_place = is_row[:, None] & is_column[None, :]
    if inner is not None:
        inner += first * width
        tl.store(inner + place, total, mask=is_place)
    if ACTIVATION == "gelu":
        total *= 0.5 * (1 + tl.erf(total * 0.7071067811865476))
    elif ACTIVATION == "swiglu":
        weight_at += O * column_stride
        scale = _multiply_tile(lhs_at, is_row, weight_at, is_column, step, D, K)
        if inner is not None:
            tl.store(inner + place + O, scale, mask=is_place)
        total *= tl.sigmoid(total) * scale
    place = tl.arange(0, M)[:, None] * O + column[None, :]
    tl.store(output + first * O + place, total, mask=is_place)


@triton.jit
def differentiate_hidden(
    grad,
    sources,
    order,
    rows,
    gates,
    weight,
    inner,
    to_inner,
    weighted,
    row_gates,
    tiles,
    D: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Write rows' ``to_inner`` (preactivations' gradient), ``weighted`` (hidden · gate), gates."""
    expert, first, end, row, column, is_column = _locate_program_tile(tiles, H, M, N)
    if first >= end:  # an unused tile
        return
    is_row = row < end
    source = tl.load(sources + row, mask=is_row, other=0)
    pair = tl.load(order + row, mask=is_row, other=0)
    # a padding row (on a CPU only) has the pair of another row, and is not read
    is_read = is_row & (tl.load(rows + pair) == row)
    gate = tl.load(gates + pair, mask=is_read, other=0).to(tl.float32)
    if tl.program_id(0) % tl.cdiv(H, N) == 0:
        tl.store(row_gates + row, gate, mask=is_row)
    place = tl.arange(0, K)
    grad_at = grad + source[:, None] * D + place[None, :]
    weight_at = weight + expert * D * H + place[:, None] + column[None, :] * D
    total = _multiply_tile(grad_at, is_row, weight_at, is_column, K, D, K)
    total *= gate[:, None]
    is_place = is_row[:, None] & is_column[None, :]
    place = tl.arange(0, M)[:, None] * WIDTH + column[None, :]
    inner += first * WIDTH
    to_inner += first * WIDTH
    value = tl.load(inner + place, mask=is_place, other=0).to(tl.float32)
    if WIDTH != H:  # SwiGLU
        scale = tl.load(inner + place + H, mask=is_place, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(value)
        active = value * sigmoid * scale
        slope = sigmoid * (1 + value * (1 - sigmoid)) * scale
        tl.store(to_inner + place + H, total * value * sigmoid, mask=is_place)
    else:
        share = 0.5 * (1 + tl.erf(value * 0.7071067811865476))  # the normal distribution
        active = value * share
        slope = share + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
    tl.store(to_inner + place, total * slope, mask=is_place)
    place = tl.arange(0, M)[:, None] * H + column[None, :]
    tl.store(weighted + first * H + place, active * gate[:, None], mask=is_place)


@triton.jit
def differentiate_weights(
    lhs,
    rhs,
    sources,
    row_gates,
    to_weight,
    to_bias,
    offsets,
    D: tl.constexpr,
    O: tl.constexpr,
    GATHER_LHS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Write each expert's weight gradient lhsᵀ · rhs (D, O) and bias gradient, the sum of rhs.

    For the first map, lhs is gathered from tokens. For the second, rhs is gathered from the
    outputs' gradient, and its sum for the bias is weighted by gates.
    """
    blocks: tl.constexpr = tl.cdiv(D, M) * tl.cdiv(O, N)
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks) // tl.cdiv(O, N)
    inputs = block * M + tl.arange(0, M)
    column = (tl.program_id(0) % tl.cdiv(O, N)) * N + tl.arange(0, N)
    is_input = inputs < D
    is_column = column < O
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    total = tl.zeros((M, N), tl.float32)
    bias = tl.zeros((N,), tl.float32)
    for start in range(begin, end, K):
        row = start + tl.arange(0, K)
        is_row = row < end
        source = tl.load(sources + row, mask=is_row, other=0).to(tl.int64)
        lhs_row = row.to(tl.int64)
        rhs_row = source
        if GATHER_LHS:
            lhs_row = source
            rhs_row = row.to(tl.int64)
        lhs_at = lhs + lhs_row[None, :] * D + inputs[:, None]
        rhs_at = rhs + rhs_row[:, None] * O + column[None, :]
        values = tl.load(lhs_at, mask=is_input[:, None] & is_row[None, :], other=0)
        part = tl.load(rhs_at, mask=is_row[:, None] & is_column[None, :], other=0)
        total = tl.dot(values, part, total, input_precision="tf32x3")
        if to_bias is not None:
            if block == 0:
                wide = part.to(tl.float32)
                if not GATHER_LHS:
                    wide *= tl.load(row_gates + row, mask=is_row, other=0)[:, None]
                bias += tl.sum(wide, 0)
    place = (expert * D + inputs)[:, None] * O + column[None, :]
    tl.store(to_weight + place, total, mask=is_input[:, None] & is_column[None, :])
    if to_bias is not None:
        if block == 0:
            tl.store(to_bias + expert * O + column, bias, mask=is_column)


@triton.jit
def sum_choices(
    values, gates, rows, output, tokens, D: tl.constexpr, CHOICES: tl.constexpr, N: tl.constexpr
):
    """Sum each token's rows of values (R, D), choice by choice, weighted by gates unless None."""
    M: tl.constexpr = 16
    token = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    is_token = token < tokens
    is_place = is_token[:, None] & (column < D)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for choice in range(CHOICES):
        pair = token.to(tl.int64) * CHOICES + choice
        row = tl.load(rows + pair, mask=is_token, other=0).to(tl.int64)
        part = tl.load(values + row[:, None] * D + column[None, :], mask=is_place, other=0)
        part = part.to(tl.float32)
        if gates is not None:
            part *= tl.load(gates + pair, mask=is_token, other=0).to(tl.float32)[:, None]
        total += part
    place = token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(output + place, total, mask=is_place)


@triton.jit
def differentiate_gates(
    values, grad, rows, to_gates, tokens, D: tl.constexpr, CHOICES: tl.constexpr, N: tl.constexpr
):
    """Write the gates' gradients: a choice's row of values (R, D) · its token's gradient (N, D)."""
    M: tl.constexpr = 16
    token = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    is_token = token < tokens
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        row = tl.load(rows + pair, mask=is_token, other=0).to(tl.int64)
        total = tl.zeros((M,), tl.float32)
        for start in range(0, D, N):
            column = start + tl.arange(0, N)
            is_place = is_token[:, None] & (column < D)[None, :]
            part = tl.load(values + row[:, None] * D + column[None, :], mask=is_place, other=0)
            other = tl.load(grad + token[:, None] * D + column[None, :], mask=is_place, other=0)
            total += tl.sum(part.to(tl.float32) * other.to(tl.float32), 1)
        tl.store(to_gates + pair, total, mask=is_token)
