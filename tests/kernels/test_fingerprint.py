"""The fingerprint: what is always seen, what adds up, and the seven kinds of corruption."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holter_kernels import fingerprint, merge, root, summarize, tree
from holter_kernels.keys import PLACES, ROWS, dtype_key, fingerprint_bits, group_key, keys
from holter_kernels.layout import BITS_DTYPE, FORMATS, bits_of
from holter_kernels.testing import from_bytes

DTYPES = list(FORMATS)
TRIALS = 1000


def test_the_worked_example() -> None:
    k, d = int(keys(np.arange(1))[0]), dtype_key(FORMATS[torch.uint8])
    shards = [torch.tensor([16], dtype=torch.uint8), torch.tensor([0, 2], dtype=torch.uint8)]
    assert ((17 + 2 * 2**16) * k + 3 * d) % 2**64 == fingerprint(torch.cat(shards))
    assert (17 * k + d) % 2**64 == fingerprint(shards[0], 0)
    assert (2 * 2**16 * k + 2 * d) % 2**64 == fingerprint(shards[1], 1)


@pytest.mark.usefixtures("instruction_set")
@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(1, 200_000),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 2**40),
)
@settings(max_examples=60)
def test_native_is_the_definition(seed: int, numel: int, dtype: torch.dtype, offset: int) -> None:
    tensor = from_bytes(np.random.default_rng(seed).bytes(numel * FORMATS[dtype].bits // 8), dtype)
    assert fingerprint_bits(FORMATS[dtype], bits_of(tensor), offset) == fingerprint(tensor, offset)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), numel=st.integers(0, 5000), offset=st.integers(0, 2**33))
@settings(max_examples=150)
def test_shards_at_any_element_offset_add_up(data: st.DataObject, dtype: torch.dtype, numel: int, offset: int) -> None:
    tensor = from_bytes(np.random.default_rng(numel).bytes(numel * FORMATS[dtype].bits // 8), dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=5)))
    edges = [0, *cuts, numel]
    shards = [fingerprint(tensor[a:b], offset + a) for a, b in pairwise(edges)]
    assert fingerprint(tensor, offset) == merge(reversed(shards))


def test_the_pass_and_the_single_call_agree() -> None:
    tensors = [torch.randn(70_000).to(dtype) for dtype in DTYPES]
    assert [fingerprint(tensor) for tensor in tensors] == summarize(tensors).fingerprint.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_change_of_one_element_is_seen(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, 3000 * FORMATS[dtype].bits // 8, dtype=np.uint8).view(f"u{FORMATS[dtype].bits // 8}")
    whole = fingerprint_bits(FORMATS[dtype], bits)
    for place in rng.integers(0, bits.size, 300):
        kept = bits[place]
        bits[place] = rng.integers(0, 1 << FORMATS[dtype].bits, dtype=np.uint64).astype(bits.dtype)
        assert (bits[place] == kept) == (fingerprint_bits(FORMATS[dtype], bits) == whole)
        bits[place] = kept


def test_dtype_length_and_zeros_are_seen() -> None:
    zeros = {fingerprint(torch.zeros(n, dtype=dtype)) for n in range(1, 50) for dtype in DTYPES}
    assert 49 * len(DTYPES) == len(zeros)
    assert fingerprint(torch.empty(0)) == 0


def test_ones_twos_and_zeros_of_even_length_differ() -> None:
    """`torch.hash_tensor`, an exclusive or, gives all three the same value."""
    assert 3 == len({fingerprint(torch.full((64,), value)) for value in (0.0, 1.0, 2.0)})


def flip(bit: int) -> Callable[[torch.Tensor, np.random.Generator], None]:
    def corrupt(x: torch.Tensor, rng: np.random.Generator) -> None:
        bits = x.view(-1).view(BITS_DTYPE[FORMATS[x.dtype].bits])
        width = FORMATS[x.dtype].bits
        which = int(rng.integers(width)) if bit < 0 else bit
        bits[int(rng.integers(bits.numel()))] ^= (1 << which) - (1 << width if which == width - 1 else 0)

    return corrupt


def swap_two(x: torch.Tensor, rng: np.random.Generator) -> None:
    flat = x.view(-1)
    while True:
        a, b = (int(k) for k in rng.integers(flat.numel(), size=2))
        if flat[a] != flat[b]:
            flat[a], flat[b] = flat[b].item(), flat[a].item()
            return


def permute_rows(x: torch.Tensor, rng: np.random.Generator) -> None:
    bits = x.view(BITS_DTYPE[FORMATS[x.dtype].bits]).numpy()
    bits[...] = bits[rng.permutation(len(bits))]  # 40 rows stay as they were once in 40!


def negate(x: torch.Tensor, _: np.random.Generator) -> None:
    x.neg_()


def transpose(x: torch.Tensor, _: np.random.Generator) -> None:
    x.copy_(x.t().clone())


def two_equal_flips(x: torch.Tensor, rng: np.random.Generator) -> None:
    bits = x.view(-1).view(BITS_DTYPE[FORMATS[x.dtype].bits])
    mask = 1 << int(rng.integers(FORMATS[x.dtype].bits - 1))
    for place in rng.choice(bits.numel(), 2, replace=False):
        bits[int(place)] ^= mask


CORRUPTIONS = {
    "one flipped bit": flip(-1),
    "low mantissa flip": flip(0),
    "two swapped elements": swap_two,
    "permuted rows": permute_rows,
    "negation": negate,
    "transposition": transpose,
    "two equal flips": two_equal_flips,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_no_corruption_is_missed_in_a_thousand_trials(kind: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(len(kind))
    missed = 0
    for trial in range(TRIALS):
        side = 40 if trial % 50 else 300  # now and then more than one group
        x = torch.from_numpy(rng.standard_normal((side, side))).to(dtype)
        before = fingerprint(x)
        CORRUPTIONS[kind](x, rng)
        missed += fingerprint(x) == before
    assert 0 == missed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_pair_of_sign_flips_in_512_elements_is_seen_and_nearly_all_differ(dtype: torch.dtype) -> None:
    """An arithmetic progression as keys gave 55,567 collisions here."""
    bits = bits_of(torch.randn(512).to(dtype))
    sign = bits.dtype.type(1 << (FORMATS[dtype].bits - 1))
    single = []
    for place in range(512):
        bits[place] ^= sign
        single.append(fingerprint_bits(FORMATS[dtype], bits))
        bits[place] ^= sign
    change = np.array(single, np.uint64) - np.uint64(fingerprint_bits(FORMATS[dtype], bits))
    pairs = (change[:, None] + change[None, :])[np.triu_indices(512, 1)]
    assert 130_816 == pairs.size
    assert pairs.all(), "a pair of flips that leaves the fingerprint as it was"
    # Keys of one block differ in 31 bits, so among 2**33 pairs of pairs one or two may meet by chance.
    assert pairs.size - np.unique(pairs).size <= 8


def trailing_zeros(x: np.ndarray) -> np.ndarray:
    return np.log2((x & -x).astype(np.float64)).astype(int)


def differences(table: np.ndarray) -> np.ndarray:
    x = table.astype(np.int64)
    return (x[:, None] - x[None, :])[np.triu_indices(x.size, 1)]


def test_the_tables_have_the_properties_that_the_proofs_need() -> None:
    assert all((table % 2 == 1).all() for table in (PLACES, ROWS, group_key(np.arange(1000))))
    assert PLACES.max() < 2**31
    assert ROWS.max() < 2**31
    # Distinct, and no difference is a multiple of a high power of two: equal changes never cancel at two places of a block,
    # at one place of two rows, or at the four corners of a rectangle, while 32 + 20 + 10 < 64.
    assert trailing_zeros(differences(PLACES)).max() <= 20
    assert trailing_zeros(differences(ROWS)).max() <= 10


def test_keys_do_not_repeat_across_groups() -> None:
    index = np.arange(0, 1 << 22, 7, dtype=np.uint64)
    assert index.size == np.unique(keys(index)).size


def test_a_root_depends_on_every_fingerprint_its_place_and_their_number() -> None:
    rng = np.random.default_rng(0)
    prints = rng.integers(0, 2**64, 1000, dtype=np.uint64)
    seen = {root(prints), root(prints[::-1].copy()), root(prints[:-1]), root([*prints.tolist(), 0])}
    for place in range(1000):
        changed = prints.copy()
        changed[place] ^= np.uint64(1)
        seen.add(root(changed))
    assert 1004 == len(seen)


def test_descent_finds_the_one_tensor_in_two_levels() -> None:
    prints = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    other = prints.copy()
    other[777] += np.uint64(1)
    a, b = tree(prints), tree(other)
    assert [1000, 32, 1] == [level.size for level in a]
    assert [777 // 32] == np.flatnonzero(a[1] != b[1]).tolist()
    assert [777] == np.flatnonzero(a[0] != b[0]).tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 31, 32, 33, 1024, 1025])
def test_a_tree_of_any_size_ends_in_one_root(count: int) -> None:
    levels = tree(range(count))
    assert 1 == levels[-1].size
    assert root(range(count)) == int(levels[-1][0])


def test_a_tree_needs_two_children() -> None:
    with pytest.raises(ValueError, match="fanout must be at least 2, got 1"):
        tree([1, 2], fanout=1)


def test_an_offset_is_not_negative() -> None:
    with pytest.raises(ValueError, match="offset must not be negative, got -1"):
        fingerprint(torch.ones(2), offset=-1)
