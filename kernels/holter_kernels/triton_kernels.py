"""The pass for GPUs: the same definition as `reference.py` and `keys.py`, in Triton.

Each program reads one job, at most 16,384 words (64 KB), and writes one partial row in the layout of `ROW`; a second kernel adds the partial
rows of each tensor in order. Which job is a program's comes from tables that stay on the device (see `Tables` in `gpu.py`): its run of elements, and which
piece of it; where the run's tensor lies now is in `bases`, one address a tensor, the only thing that changes from step to step.

`_float_job` reads float32, bfloat16 and float16 whose jobs begin at a block: one tile of 1024 words a turn, the block of the
fingerprint, so that sum over blocks b and places j of R_b * T_j * y_bj is sum over j of T_j * (sum over b of R_b * y_bj): one
multiply-add a word, T only once at the end. Its loop assumes a healthy tensor; a job that turns out to hold a zero, a subnormal, something not
finite or extreme magnitudes is read a second time, from cache.
`_element_job` reads every other dtype, and shards that begin anywhere, one element at a time. A launch of `read_pass` has jobs of one dtype, and is compiled for the kinds that it has: of both,
so that a dtype takes one launch however its tensors lie, the second may spill registers, and the first, which is nearly all, keeps its own.
"""

# A kernel is Triton's language in Python's clothes: types are the compiler's, constants are upper case, branches on them need their else.
# ruff: noqa: ANN001, ANN201, ANN202, C901, N803, N806, PLR0912, PLR0913, PLR0915, PLR0917, PLR2004, RET505, SIM108

import triton
import triton.language as tl

TILE = tl.constexpr(1024)
JOB_WORDS = tl.constexpr(16 * 1024)
RUN_FIELDS = tl.constexpr(8)
SEGMENT_FIELDS = tl.constexpr(5)
ROW_FIELDS = tl.constexpr(16)
SMALL = tl.constexpr(2.0**-40)
LARGE = tl.constexpr(2.0**50)


@triton.jit
def _mix64(x):
    """Apply the finalizer of splitmix64, as in `keys.py`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _job(jobs, runs, bases, GRAIN: tl.constexpr, BYTES: tl.constexpr):
    """Return this program's job: address, number of elements, index of the first."""
    program = tl.program_id(0).to(tl.int64)
    run = runs + tl.load(jobs + program).to(tl.int64) * RUN_FIELDS
    offset = tl.load(run + 1)
    group = offset // GRAIN + program - tl.load(run + 4)
    begin = tl.maximum(offset, group * GRAIN)
    end = tl.minimum(offset + tl.load(run + 2), (group + 1) * GRAIN)
    address = tl.load(bases + tl.load(run + 3)) + tl.load(run) + (begin - offset) * BYTES
    return address, (end - begin).to(tl.int32), begin


@triton.jit
def _run_again(jobs, runs):
    """Return the entry of this program's run. The load is volatile, or the compiler would keep it in registers all through the loop."""
    return runs + tl.load(jobs + tl.program_id(0), volatile=True).to(tl.int64) * RUN_FIELDS


@triton.jit
def _seal(sum_, run, group, count):
    """Turn the sum of R * T * y into a fingerprint: times W of the job's group, plus D for each element."""
    key = _mix64(group.to(tl.uint64) + 0x9E3779B97F4A7C15) | 1
    return sum_ * key + (count * tl.load(run + 6)).to(tl.uint64, bitcast=True)


@triton.jit
def _slot(run):
    """Return the index of this program's partial row."""
    return tl.load(run + 5) + tl.program_id(0)


@triton.jit
def _part(w, part: tl.constexpr, KIND: tl.constexpr):
    """Return element `part` of each word as float32. KIND: 0 float32, 1 bfloat16, 2 float16."""
    if KIND == 0:
        return w.to(tl.float32, bitcast=True)
    elif KIND == 1:
        half = (w << 16) if part == 0 else (w & -65536)
        return half.to(tl.float32, bitcast=True)
    else:
        half = (w & 0xFFFF) if part == 0 else ((w >> 16) & 0xFFFF)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _magnitude(w, part: tl.constexpr, KIND: tl.constexpr):
    """Return the bits of element `part` without its sign."""
    if KIND == 0:
        return w & 0x7FFFFFFF
    else:
        return (w >> (16 * part)) & 0x7FFF


@triton.jit
def _fold(w, KIND: tl.constexpr):
    """Return y of all elements of the word together."""
    v = w.to(tl.uint32, bitcast=True)
    if KIND == 0:
        return v ^ (v >> 16)
    else:
        return v ^ ((v >> 8) & 0x00FF00FF)


@triton.jit
def _load_words(words, k, num_words, count, KIND: tl.constexpr):
    """Load tile k of a job that may end within it; what lies beyond the end is 0."""
    at = k * TILE + tl.arange(0, TILE)
    w = tl.load(words + at, mask=at < num_words, other=0)
    if KIND != 0:
        # An odd last element is half a word; the other half is not part of the job.
        is_odd = count % 2 == 1
        last = tl.load(words.to(tl.pointer_type(tl.int16)) + count - 1, mask=is_odd, other=0).to(tl.int32) & 0xFFFF
        w = tl.where((at == num_words) & is_odd, last, w)
    return w


@triton.jit
def _is_ours(k, part: tl.constexpr, count, KIND: tl.constexpr):
    at = k * TILE + tl.arange(0, TILE)
    if KIND == 0:
        return at < count
    else:
        return 2 * at + part < count


@triton.jit
def _low_zero(w, KIND: tl.constexpr):
    """Mark elements whose low mantissa bits are zero: 1 for a float32, 16 in the half for each 16-bit element."""
    if KIND == 0:
        # The sign bit of (low half - 1), added by one instruction where a comparison would take two.
        return (((w & 0xFFFF) - 1).to(tl.uint32, bitcast=True) >> 31).to(tl.int32, bitcast=True)
    elif KIND == 1:
        return (0x00100010 - (w & 0x000F000F)) & 0x00100010
    else:
        return ((0x00800080 - (w & 0x007F007F)) & 0x00800080) >> 3


@triton.jit
def _low_zero_pair(w, v, KIND: tl.constexpr):
    """Mark such elements in two words of 16-bit elements at once: 16 in the byte of each."""
    both = (w & 0x00FF00FF) | ((v << 8) & -16711936)
    if KIND == 1:
        return (0x10101010 - (both & 0x0F0F0F0F)) & 0x10101010
    else:
        rest = (-2139062144 - (both & 0x7F7F7F7F)) & -2139062144
        return (rest >> 3) & 0x10101010


@triton.jit
def _observe(w, low, high, least, sums, abs_sums, square_sums, KIND: tl.constexpr):
    """Update extremes and sums from a healthy tile, lane by lane. NaN is ignored by minimum and maximum, but shows in the sums."""
    for part in tl.static_range(1 if KIND == 0 else 2):
        x = _part(w, part, KIND)
        low = tl.minimum(low, x)
        high = tl.maximum(high, x)
        least = tl.minimum(least, tl.abs(x))
        sums += x
        abs_sums += tl.abs(x)
        square_sums += x * x
    return low, high, least, sums, abs_sums, square_sums


@triton.jit
def _store_row(
    flag, partials, slot, count, zeros, subnormals, nans, pos_infs, neg_infs, low_zero, fingerprint, low, high, least,
    sum_, abs_sum, square_sum,
):  # fmt: skip
    out = partials + slot * ROW_FIELDS
    tl.store(out + 0, count)
    tl.store(out + 1, zeros.to(tl.int64))
    tl.store(out + 2, subnormals.to(tl.int64))
    tl.store(out + 3, nans.to(tl.int64))
    tl.store(out + 4, pos_infs.to(tl.int64))
    tl.store(out + 5, neg_infs.to(tl.int64))
    tl.store(out + 6, low_zero.to(tl.int64))
    tl.store(out + 7, fingerprint.to(tl.int64, bitcast=True))
    floats = out.to(tl.pointer_type(tl.float64))
    tl.store(floats + 8, low.to(tl.float64))
    tl.store(floats + 9, high.to(tl.float64))
    tl.store(floats + 10, tl.zeros((), tl.float64))  # absmax: combine_rows has it from min and max
    tl.store(floats + 11, least.to(tl.float64))
    tl.store(floats + 12, sum_)
    tl.store(floats + 13, abs_sum)
    tl.store(floats + 14, square_sum)
    tl.store(out + 15, tl.zeros((), tl.int64))
    if tl.program_id(0) == 0:
        tl.store(flag, 0.0)  # combine_rows, which comes after, sets it


@triton.jit
def _count_closely(words, num_tiles, num_words, count, KIND: tl.constexpr):
    """Count the elements of each kind in an unhealthy job, one by one; return the counts and the extremes of the finite elements."""
    NUM_PARTS: tl.constexpr = 1 if KIND == 0 else 2
    INFINITY: tl.constexpr = 0x7F800000 if KIND == 0 else (0x7F80 if KIND == 1 else 0x7C00)
    NORMAL: tl.constexpr = 0x00800000 if KIND == 0 else (0x0080 if KIND == 1 else 0x0400)
    zeros = tl.zeros((TILE,), tl.int32)
    lows = tl.zeros((TILE,), tl.int32)
    nans = tl.zeros((TILE,), tl.int32)
    pos_infs = tl.zeros((TILE,), tl.int32)
    neg_infs = tl.zeros((TILE,), tl.int32)
    low = tl.full((TILE,), float("inf"), tl.float32)
    high = tl.full((TILE,), -float("inf"), tl.float32)
    least = tl.full((TILE,), float("inf"), tl.float32)
    for k in tl.range(0, num_tiles):
        w = _load_words(words, k, num_words, count, KIND)
        for part in tl.static_range(NUM_PARTS):
            ours = _is_ours(k, part, count, KIND)
            x = _part(w, part, KIND)
            magnitude = _magnitude(w, part, KIND)
            finite = ours & (magnitude < INFINITY)
            zeros += (ours & (magnitude == 0)).to(tl.int32)
            lows += (ours & (magnitude < NORMAL)).to(tl.int32)
            nans += (ours & (magnitude > INFINITY)).to(tl.int32)
            pos_infs += (ours & (magnitude == INFINITY) & (x > 0)).to(tl.int32)
            neg_infs += (ours & (magnitude == INFINITY) & (x < 0)).to(tl.int32)
            low = tl.where(finite, tl.minimum(low, x), low)
            high = tl.where(finite, tl.maximum(high, x), high)
            least = tl.where(finite & (magnitude > 0), tl.minimum(least, tl.abs(x)), least)
    num_zeros = tl.sum(zeros, 0)
    subnormals = tl.sum(lows, 0) - num_zeros
    num_nans, num_pos, num_neg = tl.sum(nans, 0), tl.sum(pos_infs, 0), tl.sum(neg_infs, 0)
    return num_zeros, subnormals, num_nans, num_pos, num_neg, tl.min(low, 0), tl.max(high, 0), tl.min(least, 0)


@triton.jit
def _sum_widely(words, num_tiles, num_words, count, KIND: tl.constexpr):
    """Sum the finite elements in float64: return the sum, the sum of magnitudes and the sum of squares."""
    NUM_PARTS: tl.constexpr = 1 if KIND == 0 else 2
    INFINITY: tl.constexpr = 0x7F800000 if KIND == 0 else (0x7F80 if KIND == 1 else 0x7C00)
    sums = tl.zeros((TILE,), tl.float64)
    abs_sums = tl.zeros((TILE,), tl.float64)
    square_sums = tl.zeros((TILE,), tl.float64)
    for k in tl.range(0, num_tiles):
        w = _load_words(words, k, num_words, count, KIND)
        for part in tl.static_range(NUM_PARTS):
            finite = _magnitude(w, part, KIND) < INFINITY
            x = tl.where(finite, _part(w, part, KIND), 0.0).to(tl.float64)
            sums += x
            abs_sums += tl.abs(x)
            square_sums += x * x
    return tl.sum(sums, 0), tl.sum(abs_sums, 0), tl.sum(square_sums, 0)


@triton.jit
def _bin_words(words, first, num_tiles, num_words, count, KIND: tl.constexpr, HISTOGRAM: tl.constexpr):
    """Count the exponents of a job's elements.

    `first`: the job's first block of 1024 elements; a tile holds one block, or two of 16-bit elements.
    """
    NUM_PARTS: tl.constexpr = 1 if KIND == 0 else 2
    counts = tl.zeros((256,), tl.int32)
    for k in tl.range(0, num_tiles):
        tile_first = first + k * NUM_PARTS
        if (HISTOGRAM == 2) | (tile_first % 16 == 0):
            w = _load_words(words, k, num_words, count, KIND)
            for part in tl.static_range(NUM_PARTS):
                ours = _is_ours(k, part, count, KIND)
                if (HISTOGRAM == 1) & (NUM_PARTS == 2):
                    ours = ours & (tl.arange(0, TILE) < TILE // 2)  # the tile's first block
                magnitude = _magnitude(w, part, KIND)
                if KIND == 0:
                    bin_ = magnitude >> 23
                elif KIND == 1:
                    bin_ = magnitude >> 7
                else:
                    field = magnitude >> 10
                    bin_ = tl.where(field == 0, 0, tl.where(field == 31, 255, field + 112))
                counts += tl.histogram(bin_, 256, mask=ours)
    return counts


@triton.jit
def _add_bins(bins, run, counts):
    """Add counts to the histogram of the run's tensor."""
    out = bins + tl.load(run + 3) * 256 + tl.arange(0, 256)
    tl.atomic_add(out, counts.to(tl.int64), mask=counts > 0)


@triton.jit
def _float_job(
    jobs,
    runs,
    bases,
    partials,
    bins,
    flag,
    places,
    rows,
    KIND: tl.constexpr,
    STATISTICS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Read one job of float32, bfloat16 or float16. HISTOGRAM: 0 off, 1 sampled, 2 exact."""
    NUM_PARTS: tl.constexpr = 1 if KIND == 0 else 2
    SMALLEST_NORMAL: tl.constexpr = 2.0**-14 if KIND == 2 else 2.0**-126
    address, count, index = _job(jobs, runs, bases, JOB_WORDS * NUM_PARTS, 4 // NUM_PARTS)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    num_words = count // NUM_PARTS
    num_full = num_words // TILE
    num_tiles = (count + NUM_PARTS * TILE - 1) // (NUM_PARTS * TILE)
    block = (index // (NUM_PARTS * TILE)).to(tl.int32)
    place = tl.arange(0, TILE)
    infinity = float("inf")

    hashes = tl.zeros((TILE,), tl.uint64)
    low_zeros = tl.zeros((TILE,), tl.int32)
    low = tl.full((TILE,), infinity, tl.float32)
    high = tl.full((TILE,), -infinity, tl.float32)
    least = tl.full((TILE,), infinity, tl.float32)
    sums = tl.zeros((TILE,), tl.float32)
    abs_sums = tl.zeros((TILE,), tl.float32)
    square_sums = tl.zeros((TILE,), tl.float32)
    # Four tiles a turn at fixed distances, then one by one. The table of R goes on past 64, so that no index wraps.
    # At most 16 tiles: 8 pairs of 16 fit in a byte.
    low_zero_bytes = tl.zeros((TILE,), tl.int32)
    previous = low_zero_bytes
    tiles = words
    row_keys = rows + block % 64
    for _ in tl.range(0, num_full // UNROLL):
        for step in tl.static_range(UNROLL):
            w = tl.load(tiles + place + step * TILE)
            r = tl.load(row_keys + step).to(tl.uint32, bitcast=True)
            hashes += _fold(w, KIND).to(tl.uint64) * r.to(tl.uint64)
            if STATISTICS:
                if KIND == 0:
                    low_zeros += _low_zero(w, KIND)
                elif step % 2 == 1:
                    low_zero_bytes += _low_zero_pair(previous, w, KIND)
                previous = w
                low, high, least, sums, abs_sums, square_sums = _observe(
                    w, low, high, least, sums, abs_sums, square_sums, KIND
                )
        tiles = tl.multiple_of(tiles + UNROLL * TILE, 16)
        row_keys += UNROLL
    low_zeros += (low_zero_bytes & 0x00FF00FF) + ((low_zero_bytes >> 8) & 0x00FF00FF)
    for k in tl.range(num_full // UNROLL * UNROLL, num_full):
        w = tl.load(words + k * TILE + place)
        r = tl.load(rows + block % 64 + k).to(tl.uint32, bitcast=True)
        hashes += _fold(w, KIND).to(tl.uint64) * r.to(tl.uint64)
        if STATISTICS:
            low_zeros += _low_zero(w, KIND)
            low, high, least, sums, abs_sums, square_sums = _observe(
                w, low, high, least, sums, abs_sums, square_sums, KIND
            )
    if num_full < num_tiles:
        w = _load_words(words, num_full, num_words, count, KIND)
        r = tl.load(rows + block % 64 + num_full).to(tl.uint32, bitcast=True)
        hashes += _fold(w, KIND).to(tl.uint64) * r.to(tl.uint64)
        if STATISTICS:
            low_zeros += _low_zero(w, KIND)
            for part in tl.static_range(NUM_PARTS):
                x = _part(w, part, KIND)
                ours = _is_ours(num_full, part, count, KIND)
                low = tl.where(ours, tl.minimum(low, x), low)
                high = tl.where(ours, tl.maximum(high, x), high)
                least = tl.where(ours, tl.minimum(least, tl.abs(x)), least)
                sums += x
                abs_sums += tl.abs(x)
                square_sums += x * x

    keys = tl.load(places + place).to(tl.uint32, bitcast=True).to(tl.uint64)
    run = _run_again(jobs, runs)
    fingerprint = _seal(tl.sum(hashes * keys, 0), run, block >> 6, count)

    zeros = tl.zeros((), tl.int32)
    subnormals = tl.zeros((), tl.int32)
    nans = tl.zeros((), tl.int32)
    pos_infs = tl.zeros((), tl.int32)
    neg_infs = tl.zeros((), tl.int32)
    low_zero = tl.zeros((), tl.int32)
    lowest = tl.min(low, 0)
    highest = tl.max(high, 0)
    smallest = tl.min(least, 0)
    total = tl.sum(sums.to(tl.float64), 0)
    abs_total = tl.sum(abs_sums.to(tl.float64), 0)
    square_total = tl.sum(square_sums.to(tl.float64), 0)
    if STATISTICS:
        beyond = num_tiles * TILE * NUM_PARTS - count  # of the last tile: zeros that are not ours
        if KIND == 0:
            low_zero = tl.sum(low_zeros, 0) - beyond
        else:
            low_zero = tl.sum(((low_zeros & 0xFFFF) + (low_zeros >> 16)) >> 4, 0) - beyond
        largest = tl.maximum(highest, -lowest)
        is_finite = abs_total < infinity  # false for NaN too
        is_tame = is_finite & (largest <= LARGE) & ((largest >= SMALL) | (abs_total == 0))
        if (not is_finite) | (smallest < SMALLEST_NORMAL):
            zeros, subnormals, nans, pos_infs, neg_infs, lowest, highest, smallest = _count_closely(
                words, num_tiles, num_words, count, KIND
            )
        if not is_tame:
            total, abs_total, square_total = _sum_widely(words, num_tiles, num_words, count, KIND)
    _store_row(
        flag, partials, _slot(run), count.to(tl.int64), zeros, subnormals, nans, pos_infs, neg_infs, low_zero, fingerprint,
        lowest, highest, smallest, total, abs_total, square_total,
    )  # fmt: skip

    if HISTOGRAM != 0:
        _add_bins(bins, run, _bin_words(words, block * NUM_PARTS, num_tiles, num_words, count, KIND, HISTOGRAM))


@triton.jit
def _element_job(
    jobs,
    runs,
    bases,
    partials,
    bins,
    flag,
    places,
    rows,
    GRAIN: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_SIGNED: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    LARGEST_FINITE: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
    STATISTICS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    """Read one job of any dtype that may begin at any element; elements are classified one by one and summed in float64."""
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1 if IS_FLOAT else 0
    IN_WORD: tl.constexpr = 32 // BITS if BITS < 32 else 1
    address, count, index = _job(jobs, runs, bases, GRAIN, BITS // 8)
    if BITS == 8:
        elements = address.to(tl.pointer_type(tl.uint8))
    elif BITS == 16:
        elements = address.to(tl.pointer_type(tl.uint16))
    elif BITS == 32:
        elements = address.to(tl.pointer_type(tl.uint32))
    else:
        elements = address.to(tl.pointer_type(tl.uint64))
    infinity = float("inf")

    hashes = tl.zeros((TILE,), tl.uint64)
    zero_counts = tl.zeros((TILE,), tl.int32)
    subnormal_counts = tl.zeros((TILE,), tl.int32)
    nan_counts = tl.zeros((TILE,), tl.int32)
    pos_counts = tl.zeros((TILE,), tl.int32)
    neg_counts = tl.zeros((TILE,), tl.int32)
    low_zeros = tl.zeros((TILE,), tl.int32)
    low = tl.full((TILE,), infinity, tl.float64)
    high = tl.full((TILE,), -infinity, tl.float64)
    least = tl.full((TILE,), infinity, tl.float64)
    sums = tl.zeros((TILE,), tl.float64)
    abs_sums = tl.zeros((TILE,), tl.float64)
    square_sums = tl.zeros((TILE,), tl.float64)
    counts = tl.zeros((256,), tl.int32)
    for k in tl.range(0, tl.cdiv(count, TILE)):
        at = k * TILE + tl.arange(0, TILE)
        ours = at < count
        v = tl.load(elements + at, mask=ours, other=0).to(tl.uint64)
        where = index + at
        word = where // IN_WORD
        y = v ^ (v >> (BITS // 2))
        if BITS == 64:
            y = y ^ (y >> 16)
        else:
            y = y << (BITS * (where % IN_WORD)).to(tl.uint64)
        t = tl.load(places + word % 1024, mask=ours, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        r = tl.load(rows + (word // 1024) % 64, mask=ours, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        hashes += y * t * r
        if STATISTICS:
            signed = v.to(tl.int64, bitcast=True)
            if IS_FLOAT:
                magnitude = signed & ((1 << (BITS - 1)) - 1)
                negative = magnitude != signed
                field = magnitude >> MANTISSA_BITS
                mantissa = magnitude & ((1 << MANTISSA_BITS) - 1)
                finite = ours & (magnitude <= LARGEST_FINITE)
                bits = ((field - BIAS + 1023) << 52) | (mantissa << (52 - MANTISSA_BITS))
                if BITS == 64:
                    bits = magnitude
                size = bits.to(tl.float64, bitcast=True)
                if BITS != 64:
                    size = tl.where(field == 0, mantissa.to(tl.float64) * 2.0 ** (1 - BIAS - MANTISSA_BITS), size)
                size = tl.where(finite, size, 0.0)
                x = tl.where(negative, -size, size)
                is_zero = ours & (magnitude == 0)
                subnormal_counts += (ours & (field == 0) & (mantissa != 0)).to(tl.int32)
                is_infinite = ours & (magnitude == LARGEST_FINITE + 1) & HAS_INFINITY
                pos_counts += (is_infinite & (magnitude == signed)).to(tl.int32)
                neg_counts += (is_infinite & negative).to(tl.int32)
                nan_counts += (ours & (magnitude > LARGEST_FINITE) & (is_infinite == 0)).to(tl.int32)
                if LOW_BITS > 0:
                    low_zeros += (ours & ((magnitude & ((1 << LOW_BITS) - 1)) == 0)).to(tl.int32)
                if HISTOGRAM != 0:
                    chosen = ours
                    if HISTOGRAM == 1:
                        chosen = ours & ((where // 1024) % 16 == 0)
                    bin_ = tl.minimum(tl.maximum(field - BIAS + 127, 1), 254)
                    bin_ = tl.where(field == 0, 0, tl.where(magnitude > LARGEST_FINITE, 255, bin_))
                    counts += tl.histogram(bin_.to(tl.int32), 256, mask=chosen)
            else:
                if IS_SIGNED:
                    signed = (signed << (64 - BITS)) >> (64 - BITS)
                x = signed.to(tl.float64)
                size = tl.abs(x)
                finite = ours
                is_zero = ours & (signed == 0)
            zero_counts += is_zero.to(tl.int32)
            low = tl.where(finite, tl.minimum(low, x), low)
            high = tl.where(finite, tl.maximum(high, x), high)
            least = tl.where(finite & (size > 0), tl.minimum(least, size), least)
            sums += x
            abs_sums += size
            square_sums += size * size
    run = _run_again(jobs, runs)
    fingerprint = _seal(tl.sum(hashes, 0), run, (index // IN_WORD) >> 16, count)
    _store_row(
        flag, partials, _slot(run), count.to(tl.int64), tl.sum(zero_counts, 0), tl.sum(subnormal_counts, 0), tl.sum(nan_counts, 0),
        tl.sum(pos_counts, 0), tl.sum(neg_counts, 0), tl.sum(low_zeros, 0), fingerprint, tl.min(low, 0), tl.max(high, 0),
        tl.min(least, 0), tl.sum(sums, 0), tl.sum(abs_sums, 0), tl.sum(square_sums, 0),
    )  # fmt: skip
    if HISTOGRAM != 0:
        _add_bins(bins, run, counts)


@triton.jit
def read_pass(
    jobs,
    runs,
    bases,
    partials,
    bins,
    flag,
    places,
    rows,
    HAS_FAST: tl.constexpr,
    HAS_SLOW: tl.constexpr,
    KIND: tl.constexpr,
    UNROLL: tl.constexpr,
    GRAIN: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    IS_SIGNED: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    LARGEST_FINITE: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
    STATISTICS: tl.constexpr,
    HISTOGRAM: tl.constexpr,
):
    """Read jobs of one dtype.

    Jobs of float32, bfloat16 or float16 that begin at a block and at a multiple of 16 bytes are read fast.
    """
    is_fast = HAS_FAST
    if HAS_FAST and HAS_SLOW:
        is_fast = tl.load(runs + tl.load(jobs + tl.program_id(0)).to(tl.int64) * RUN_FIELDS + 7) != 0
    if is_fast:
        _float_job(jobs, runs, bases, partials, bins, flag, places, rows, KIND, STATISTICS, HISTOGRAM, UNROLL)
    else:
        _element_job(
            jobs, runs, bases, partials, bins, flag, places, rows, GRAIN, BITS, IS_FLOAT, IS_SIGNED, EXPONENT_BITS, MANTISSA_BITS,
            LOW_BITS, LARGEST_FINITE, HAS_INFINITY, STATISTICS, HISTOGRAM,
        )  # fmt: skip


@triton.jit
def _add_rows(rows, start, end, CHUNK: tl.constexpr):
    """Add up fields 0 to 7 and fields 8 to 14 of partial rows: CHUNK rows a turn, then a tree; the order is the same at every launch."""
    lane = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, ROW_FIELDS)[None, :]
    infinity = float("inf")
    is_least = (column == 8) | (column == 11)
    is_most = column == 9
    is_sum = (column >= 12) & (column < 15)
    nothing = tl.where(is_least, infinity, tl.where(is_most, -infinity, 0.0)).to(tl.float64)
    counts = tl.zeros((CHUNK, ROW_FIELDS), tl.int64)
    floats = tl.zeros((CHUNK, ROW_FIELDS), tl.float64) + nothing
    for k in tl.range(start, end, CHUNK):
        ours = k + lane < end
        # .cg: what other programs have just written is in L2, not in this one's L1.
        raw = tl.load(rows + (k + lane) * ROW_FIELDS + column, mask=ours, other=0, cache_modifier=".cg")
        counts += tl.where(column < 8, raw, 0)
        x = tl.where(ours & (column >= 8), raw.to(tl.float64, bitcast=True), nothing)
        floats = tl.where(is_sum, floats + x, tl.where(is_least, tl.minimum(floats, x), tl.maximum(floats, x)))
    total = tl.sum(counts, 0)
    sums = tl.sum(tl.where(is_sum, floats, 0.0), 0)
    least = tl.min(tl.where(is_least, floats, infinity), 0)
    most = tl.max(tl.where(is_most, floats, -infinity), 0)
    field = tl.arange(0, ROW_FIELDS)
    values = tl.where((field == 8) | (field == 11), least, tl.where(field == 9, most, sums))
    return total, values


@triton.jit
def _store_total(out, total, values):
    field = tl.arange(0, ROW_FIELDS)
    tl.store(out + field, tl.where(field < 8, total, values.to(tl.int64, bitcast=True)))


@triton.jit
def combine_rows(partials, segments, seconds, tickets, out, flag, CHUNK: tl.constexpr):
    """Compute the row of a tensor from its partial rows, always added in the same order.

    A program adds one segment. A tensor of several segments is finished by whichever of its programs comes last, from
    what all of them wrote.
    """
    segment = segments + tl.program_id(0).to(tl.int64) * SEGMENT_FIELDS
    row = tl.load(segment)
    first = tl.load(segment + 3)
    num_segments = tl.load(segment + 4)
    total, values = _add_rows(partials, tl.load(segment + 1), tl.load(segment + 2), CHUNK)
    is_last = num_segments == 1
    if num_segments > 1:
        _store_total(seconds + tl.program_id(0).to(tl.int64) * ROW_FIELDS, total, values)
        tl.debug_barrier()  # every thread's share is written before the ticket is taken
        is_last = tl.atomic_add(tickets + row, 1, sem="acq_rel").to(tl.int64) == num_segments - 1
        if is_last:
            tl.store(tickets + row, 0)  # as the next launch wants it
            total, values = _add_rows(seconds, first, first + num_segments, CHUNK)
    if is_last:
        field = tl.arange(0, ROW_FIELDS)
        low = tl.sum(tl.where(field == 8, values, 0.0), 0)
        high = tl.sum(tl.where(field == 9, values, 0.0), 0)
        _store_total(out + row * ROW_FIELDS, total, tl.where(field == 10, tl.maximum(high, -low), values))
        if tl.sum(tl.where((field >= 3) & (field <= 5), total, 0), 0) > 0:
            tl.store(flag, 1.0)
