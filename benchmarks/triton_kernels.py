"""Kernels in Triton for MLP experts; triton_experts.py launches them and names their arguments.

Widths are constants, so a kernel is compiled per layer size: depths that are multiples of a step
need no mask. M, N and K are a program's rows, columns and depth of a step.
"""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]


@triton.jit
def list_tiles(offsets, tiles, experts, number, M: tl.constexpr, B: tl.constexpr):
    """Write expert, first row, and end of the expert's rows per tile (number, 3); -1: unused."""
    tile = tl.program_id(0) * B + tl.arange(0, B)
    expert = tl.zeros((B,), tl.int32)
    first_tile = tl.zeros((B,), tl.int32)
    first_row = tl.zeros((B,), tl.int32)
    total = 0
    for start in range(0, experts, B):
        place = start + tl.arange(0, B)
        is_expert = place < experts
        end = tl.load(offsets + place, mask=is_expert, other=0)
        begin = tl.load(offsets + place - 1, mask=is_expert & (place > 0), other=0)
        count = tl.where(is_expert, (end - begin + M - 1) // M, 0)
        last = total + tl.cumsum(count, 0)
        is_past = (last[None, :] <= tile[:, None]) & is_expert[None, :]
        expert += tl.sum(is_past.to(tl.int32), 1)
        first_tile = tl.maximum(first_tile, tl.max(tl.where(is_past, last[None, :], 0), 1))
        first_row = tl.maximum(first_row, tl.max(tl.where(is_past, end[None, :], 0), 1))
        total += tl.sum(count, 0)
    is_tile = tile < number
    is_used = is_tile & (expert < experts)
    end = tl.load(offsets + expert, mask=is_used, other=0)
    tl.store(tiles + 3 * tile, tl.where(is_used, expert, -1), mask=is_tile)
    tl.store(tiles + 3 * tile + 1, first_row + (tile - first_tile) * M, mask=is_tile)
    tl.store(tiles + 3 * tile + 2, end, mask=is_tile)


@triton.jit
def _place_program(tiles, width: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Return this program's expert, first row, rows, columns, and which of them exist."""
    # Offsets of a tile's entries count from its first row and fit 32 bits: with 64 bits for each
    # entry, registers are spilled.
    tile = tl.program_id(0) // tl.cdiv(width, N)
    expert = tl.load(tiles + 3 * tile).to(tl.int64)
    first = tl.load(tiles + 3 * tile + 1).to(tl.int64)
    row = first.to(tl.int32) + tl.arange(0, M)
    column = (tl.program_id(0) % tl.cdiv(width, N)) * N + tl.arange(0, N)
    return expert, first, row, row < tl.load(tiles + 3 * tile + 2), column, column < width


@triton.jit
def _multiply_tile(
    left,
    row,
    is_row,
    weight,
    column,
    is_column,
    row_stride,
    column_stride,
    depth: tl.constexpr,
    PRECISION: tl.constexpr,
    K: tl.constexpr,
):
    """Return rows of ``left`` (…, depth) times columns of one expert's weight, in fp32."""
    place = tl.arange(0, K)
    left_at = left + row.to(tl.int64)[:, None] * depth + place[None, :]
    weight_at = weight + place[:, None] * row_stride + column[None, :] * column_stride
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(0, depth, K):
        if depth % K == 0:
            values = tl.load(left_at, mask=is_row[:, None], other=0)
            part = tl.load(weight_at, mask=is_column[None, :], other=0)
        else:
            is_place = start + place < depth
            values = tl.load(left_at, mask=is_row[:, None] & is_place[None, :], other=0)
            part = tl.load(weight_at, mask=is_place[:, None] & is_column[None, :], other=0)
        total = tl.dot(values, part, total, input_precision=PRECISION)
        left_at += K
        weight_at += K * row_stride
    return total


@triton.jit
def multiply_rows(
    values,
    sources,
    weight,
    bias,
    inner,
    output,
    tiles,
    row_stride,
    column_stride,
    D: tl.constexpr,
    O: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Multiply rows by their experts' weights, add biases, and apply an activation.

    ACTIVATION: none, gelu (erf form), or swiglu, whose weight has 2·O columns, the gate's first.
    Rows are gathered from ``sources``, and values before it written to ``inner``, unless None.
    """
    expert, first, row, is_row, column, is_column = _place_program(tiles, O, M, N)
    if expert < 0:
        return
    source = tl.load(sources + row, mask=is_row, other=0) if sources is not None else row
    width: tl.constexpr = 2 * O if ACTIVATION == "swiglu" else O
    part = weight + expert * D * width
    total = _multiply_tile(
        values, source, is_row, part, column, is_column, row_stride, column_stride, D, PRECISION, K
    )
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
        scale = _multiply_tile(
            values,
            source,
            is_row,
            part + O,
            column,
            is_column,
            row_stride,
            column_stride,
            D,
            PRECISION,
            K,
        )
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
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Write the gradient of ``inner``, hidden values times their gates, and the gates by row."""
    expert, first, row, is_row, column, is_column = _place_program(tiles, H, M, N)
    if expert < 0:
        return
    source = tl.load(sources + row, mask=is_row, other=0)
    pair = tl.load(order + row, mask=is_row, other=0)
    # a row of padding (on a CPU) names a pair whose row is another
    is_read = is_row & (tl.load(rows + pair) == row)
    gate = tl.load(gates + pair, mask=is_read, other=0).to(tl.float32)
    if tl.program_id(0) % tl.cdiv(H, N) == 0:
        tl.store(row_gates + row, gate, mask=is_row)
    part = weight + expert * D * H
    total = _multiply_tile(grad, source, is_row, part, column, is_column, 1, D, D, PRECISION, K)
    total *= gate[:, None]
    is_place = is_row[:, None] & is_column[None, :]
    width: tl.constexpr = 2 * H if GATED else H
    place = tl.arange(0, M)[:, None] * width + column[None, :]
    inner += first * width
    to_inner += first * width
    value = tl.load(inner + place, mask=is_place, other=0).to(tl.float32)
    if GATED:
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
    left,
    right,
    sources,
    row_gates,
    to_weight,
    to_bias,
    offsets,
    D: tl.constexpr,
    O: tl.constexpr,
    GATHER_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Sum left (…, D)ᵀ times right (…, O) over each expert's rows, and right alone: the bias.

    Up: the left is gathered from tokens. Down: the right is, from the outputs' gradient, and its
    sum for the bias is weighted by gates.
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
        left_row = source if GATHER_LEFT else row.to(tl.int64)
        right_row = row.to(tl.int64) if GATHER_LEFT else source
        left_at = left + left_row[None, :] * D + inputs[:, None]
        right_at = right + right_row[:, None] * O + column[None, :]
        values = tl.load(left_at, mask=is_input[:, None] & is_row[None, :], other=0)
        part = tl.load(right_at, mask=is_row[:, None] & is_column[None, :], other=0)
        total = tl.dot(values, part, total, input_precision=PRECISION)
        if to_bias is not None:
            if block == 0:
                wide = part.to(tl.float32)
                if not GATHER_LEFT:
                    wide *= tl.load(row_gates + row, mask=is_row, other=0)[:, None]
                bias += tl.sum(wide, 0)
    place = (expert * D + inputs)[:, None] * O + column[None, :]
    tl.store(to_weight + place, total, mask=is_input[:, None] & is_column[None, :])
    if to_bias is not None:
        if block == 0:
            tl.store(to_bias + expert * O + column, bias, mask=is_column)


@triton.jit
def sum_choices(
    values,
    gates,
    rows,
    output,
    tokens,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Sum each token's rows of values (R, D), choice by choice, weighted by gates unless None."""
    token = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    is_token = token < tokens
    is_place = is_token[:, None] & (column < D)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for choice in range(CHOICES):
        pair = token.to(tl.int64) * CHOICES + choice
        row = tl.load(rows + pair, mask=is_token, other=0).to(tl.int64)
        part = tl.load(values + row[:, None] * D + column[None, :], mask=is_place, other=0)
        if gates is not None:
            gate = tl.load(gates + pair, mask=is_token, other=0).to(tl.float32)
            total += part.to(tl.float32) * gate[:, None]
        else:
            total += part.to(tl.float32)
    place = token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(output + place, total, mask=is_place)


@triton.jit
def differentiate_gates(
    values,
    grad,
    rows,
    to_gates,
    tokens,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Write the product of each pair's row of values (R, D) with its token's gradient (N, D)."""
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
