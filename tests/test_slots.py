"""Sums in float32 by slots: an example chooses its slot alone, and moves one slot alone."""

import numpy as np
import pytest
import torch

from pubsel.algorithms import dp_sgd
from pubsel.gradients import matrix
from pubsel.gradients import slots as module
from pubsel.gradients.book_keeping import BookKeeping
from pubsel.gradients.factored import FactoredGradients, LinearGradients
from pubsel.gradients.matrix import SLOT, PerExampleGradients, Slots, add_products, is_on_lines, on_lines, weighted_sum
from pubsel.gradients.slots import FEWEST, LOAD, MOST, PrivateSlots, by_slot, private_slots, slots_of
from pubsel.privacy import accountant, lattice

ALLOWED = 1 + accountant.ROUNDING
WITHIN = 2 * SLOT**2 * 2.0**-24  # what one slot may add to a row
LONG = [pytest.mark.slow, pytest.mark.long]


def linear(d: int, classes: int = 2, bias: bool = False) -> torch.nn.Linear:
    model = torch.nn.Linear(d, classes, bias=bias)
    torch.nn.init.zeros_(model.weight)
    return model


def test_the_bound_has_room_for_all_that_shares_it():
    """Slots, sums in float64 and the lattice."""
    assert WITHIN + MOST**2 * 2.0**-52 + lattice.FINEST < accountant.ROUNDING
    assert LOAD < SLOT < FEWEST


def test_a_slot_follows_from_the_example_alone():
    torch.manual_seed(0)
    x, y = torch.randn(5000, 3, 7), torch.randint(3, (5000,))
    whole = slots_of(x, y, 40)
    assert torch.equal(slots_of(x[1:], y[1:], 40), whole[1:])
    mixed = torch.randperm(5000)
    assert torch.equal(slots_of(x[mixed], y[mixed], 40), whole[mixed])
    assert set(whole.tolist()) == set(range(40))
    assert not torch.equal(slots_of(x, 1 - y, 40), whole)


@pytest.mark.parametrize(
    "kind", [torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bfloat16]
)
def test_slots_are_filled_evenly(kind):
    """By examples of any kind, wide ones too, of which some numbers count; few slots have too many."""
    torch.manual_seed(0)
    for width in (4, 5000):
        x = (10 * torch.randn(48 * 60, width)).abs().to(kind)
        chosen = slots_of(x, torch.zeros(len(x), dtype=torch.long), 60)
        assert chosen.bincount(minlength=60).double().std() < 12  # of a Poisson number 7
    rows = torch.zeros(0, 4)
    assert len(slots_of(rows, torch.zeros(0, dtype=torch.long), 1)) == 0


def test_rows_of_a_slot_come_together_and_crowded_slots_last():
    slots = torch.tensor([2, 0, 1, 2, 0] + [1] * SLOT)
    order, sizes = by_slot(slots, 4)
    assert sizes == [2, 0, 2, 0]
    assert order[:4].tolist() == [1, 4, 0, 3]
    assert sorted(order[4:].tolist()) == [2, *range(5, 5 + SLOT)]


@pytest.mark.parametrize("d", [16, 37])
@pytest.mark.parametrize("arranged", [True, False])
@pytest.mark.parametrize("classes", [2, 5])
def test_sums_are_those_of_float64(d, arranged, classes, monkeypatch):
    """Wherever slots lie in memory, one of them crowded, with a bias; of all classes, or of two at a time."""
    torch.manual_seed(0)
    monkeypatch.setattr(matrix, "TOTAL_ENTRIES", classes * d)
    r, x, weights = torch.randn(600, 5), torch.randn(600, d), torch.rand(600, dtype=torch.float64)
    slots = torch.randint(12, (600,)).where(torch.rand(600) < 0.8, 3)
    order, sizes = by_slot(slots, 12)
    assert 0 < sum(sizes) < 600
    if arranged:
        r, x, weights, order = r[order], x[order], weights[order], None
    g = FactoredGradients(r, x, True)
    found, exact = g.combine(weights, Slots(sizes, order)), g.combine(weights)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, exact)


def of_linear(x, y, expected):
    """The sum of all rows, clipped to norm 1, as a training takes it."""
    slots = PrivateSlots(LinearGradients(linear(x.shape[1])), x, y, expected)
    x, y = slots.arrange(x, y)
    places, engine = slots.batch(None)
    assert places is None
    return sum(dp_sgd.clipped_sum(block, 1.0) for block in engine.blocks(x, y))


def vanishing(n, d):
    """Examples of which 23 add up to 16.3, and 41 take away what float32 then loses, but not after 22; all of them
    different."""
    small = torch.arange(n) % SLOT >= 23
    x, y = torch.zeros(n, d), small.long()
    x[:, 0] = torch.where(small, 2 * 0.45 * 2.0**-19, 100.0)
    x[:, 1] = 1e-30 * torch.arange(n)
    return x, y


@pytest.mark.attack
@pytest.mark.parametrize("n", [20_000, pytest.param(60_000, marks=LONG)])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_example_less_moves_the_sum_by_its_row(n, place):
    """In any place; also if it is exchanged for another one."""
    x, y = vanishing(n, 16)
    i = {"first": 0, "middle": n // 2, "last": n - 1}[place]
    kept = torch.arange(n) != i
    whole = of_linear(x, y, n)
    assert float((whole - of_linear(x[kept], y[kept], n)).norm()) <= 1 + WITHIN
    other = x.clone()
    other[i] = -100
    assert float((whole - of_linear(other, y, n)).norm()) <= 2 * (1 + WITHIN)


@pytest.mark.attack
def test_slots_by_the_place_of_an_example_are_not_safe(monkeypatch):
    """What is attacked: all examples after one that is left out then change their slots."""
    n = 60_000
    x, y = vanishing(n, 16)
    monkeypatch.setattr(module, "slots_of", lambda x, y, slots: torch.arange(len(x)) // SLOT)
    moved = float((of_linear(x, y, n) - of_linear(x[1:], y[1:], n)).norm())
    assert moved > 1.02


@pytest.mark.attack
@pytest.mark.parametrize("rows", [SLOT - 1, SLOT, SLOT + 1, 400])
def test_a_full_slot_moves_by_little_more_than_a_row(rows):
    """In all orders: large rows first or last, cancelling ones, huge and tiny factors; the largest move is of float32
    and not of float64."""
    torch.manual_seed(0)
    large = torch.full((rows,), 1.0)
    small = torch.where(torch.arange(rows) < 33, 1.0, 0.45 * 2.0**-18)
    mixed = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0 + 2.0**-12)
    most = 0.0
    for values in (large, small, small.flip(0), mixed, torch.rand(rows), torch.logspace(0, -20, rows)):
        for scale in (1.0, 1e15, 1e-15):
            left, right = (values * scale)[:, None], torch.full((rows, 1), 1 / scale)
            sums = []
            for kept in (slice(None), slice(1, None), slice(0, -1)):
                total, n = torch.zeros(1, 1, dtype=torch.float64), len(left[kept])
                sizes = [n] if n <= SLOT else []
                add_products(total, left[kept], torch.ones(n, dtype=torch.float64), right[kept], Slots(sizes))
                sums.append(float(total))
            most = max(most, *(abs(sums[0] - less) for less in sums[1:]))
    assert most <= 1 + WITHIN


def test_other_slots_do_not_move_by_a_bit():
    """One row less, at any place of memory: the sums of all other slots are equal, bit for bit."""
    torch.manual_seed(0)
    n, d = 3000, 37
    r, x, slots = torch.randn(n, 3), torch.randn(n, d), torch.randint(60, (n,))

    def sums(kept):
        order, sizes = by_slot(slots[kept], 60)
        each = []
        rows, left = x[kept][order], r[kept][order]
        for number in range(60):  # all others have weight zero
            weights = torch.zeros(len(rows), dtype=torch.float64)
            weights[sum(sizes[:number]) : sum(sizes[: number + 1])] = 0.3
            each.append(FactoredGradients(left, rows, False).combine(weights, Slots(sizes)))
        return torch.stack(each), sizes

    whole, full = sums(torch.arange(n))
    removed = 100
    less, other = sums(torch.arange(n) != removed)
    assert [a - b for a, b in zip(full, other, strict=True)] == [int(i == int(slots[removed])) for i in range(60)]
    changed = (whole != less).any(1).nonzero().flatten().tolist()
    assert changed == [int(slots[removed])]


@pytest.mark.attack
@pytest.mark.parametrize("known", [True, False])
def test_a_broken_example_changes_no_other_slot(known):
    """Its row counts as zero, and what is emptied for it is summed from memory that lies as before, bit for bit."""
    torch.manual_seed(0)
    n, d, number = 2000, 37, 40
    x, y, slots = torch.randn(n, d), torch.arange(n) % 2, torch.randint(number, (n,))
    order, sizes = by_slot(slots, number)
    x, y = on_lines(x[order]), y[order]
    engine = LinearGradients(linear(d))

    def sums(x):
        block = engine.matrix(x, y, squares=engine.squares(x) if known else None)
        weights = [torch.arange(n).ge(start) & torch.arange(n).lt(start + size) for start, size in starts]
        return torch.stack([block.combine(part.double(), Slots(sizes)) for part in weights])

    starts = [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    whole = sums(x)
    x = on_lines(x)
    x[5] = torch.nan
    changed = (whole != sums(x)).any(1).nonzero().flatten().tolist()
    assert changed == [next(i for i, (start, size) in enumerate(starts) if start + size > 5)]


def test_of_a_network_blocks_have_whole_slots():
    """The rows of a wide layer are added up by slots, those of crowded slots in float64; whatever the passes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 3))
    x, y = torch.randn(700, 256), torch.arange(700) % 3
    x[:100], y[:100] = x[0], y[0]
    engine = BookKeeping(model.eval())
    slots = private_slots(engine, x, y, 700)
    places, slotted = slots.batch(None)
    blocks = list(slotted.blocks(x[places], y[places]))
    assert sum(len(block) for block in blocks) == 700
    assert sum(len(block) for block in blocks if block.slots is None) >= 100
    assert all(sum(block.slots.sizes) == len(block) for block in blocks if block.slots is not None)

    found = sum(dp_sgd.clipped_sum(block, 1.0) for block in slotted.blocks(x[places], y[places]))
    exact = sum(dp_sgd.clipped_sum(block, 1.0) for block in engine.blocks(x, y))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found, exact)

    x[500] = torch.nan  # whoever is in its block is added up as before
    assert all(is_on_lines(block.narrow) for block in slotted.blocks(x[places], y[places]))


@pytest.mark.attack
def test_rows_that_are_written_out_are_added_up_by_slots():
    """In memory of an engine, wherever a slot begins in it, bit for bit; and in float64 elsewhere."""
    torch.manual_seed(0)
    engine = PerExampleGradients(linear(37, 3, bias=True))
    memory = engine._memory(300, torch.float32).copy_(torch.randn(300, engine.size))
    weights = torch.rand(300, dtype=torch.float64)
    exact = weighted_sum(memory, weights)
    sizes = [50, 64, 0, 7, 60, 64, 55]
    found = weighted_sum(memory, weights, Slots(sizes))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, exact)
    assert torch.equal(weighted_sum(memory.contiguous()[:, :-1], weights, Slots(sizes)), exact[:-1])
    for first in range(0, 250, 3):
        part, factors = memory[first : first + 50], weights[first : first + 50]
        moved = engine._memory(300, torch.float32)[7:57]
        kept = part.clone()
        alone = weighted_sum(part, factors, Slots([50]))
        moved.copy_(kept)
        assert torch.equal(weighted_sum(moved, factors, Slots([50])), alone)


def test_a_sample_has_the_slots_and_norms_of_its_examples():
    torch.manual_seed(0)
    x, y = torch.randn(900, 20), torch.arange(900) % 2
    engine = LinearGradients(linear(20))
    slots = private_slots(engine, x, y, 300)
    chosen = torch.arange(0, 900, 3)
    places, slotted = slots.batch(chosen)
    assert sorted(places.tolist()) == chosen.tolist()
    (block,) = slotted.blocks(x[places], y[places])
    torch.testing.assert_close(block.row_norms(), engine.matrix(x[places], y[places]).row_norms(), rtol=0, atol=0)
    numbers = slots_of(x, y, slots.number)[places]
    assert block.slots.sizes == numbers.bincount(minlength=slots.number).tolist()
    _, none = slots.batch(torch.zeros(0, dtype=torch.long))
    (empty,) = none.blocks(x[:0], y[:0])
    assert not dp_sgd.clipped_sum(empty, 1.0).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_features_that_are_not_finite_count_as_zero(bad):
    """Though norms of features are known, so that others need not be emptied."""
    torch.manual_seed(0)
    x, y = torch.randn(500, 9), torch.randint(2, (500,))
    x[3, 4] = bad
    inner, sums = LinearGradients(linear(9, bias=True)), []
    for rows in (torch.arange(500), torch.arange(500) != 3):
        slots = PrivateSlots(inner, x[rows], y[rows], 500)
        assert (slots.squares is None) == (len(slots.slots) == 500)
        arranged = slots.arrange(x[rows], y[rows])
        (block,) = slots.batch(None)[1].blocks(*arranged)
        sums.append(block.combine(torch.ones(len(block), dtype=torch.float64), block.slots))
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


def test_where_there_are_no_slots():
    """In float64 networks, with few examples a pass, and in samples that a linear classifier takes in parts."""
    x, y = torch.randn(40, 6), torch.zeros(40, dtype=torch.long)
    assert private_slots(LinearGradients(linear(6).double()), x, y, 40) is None
    assert private_slots(BookKeeping(torch.nn.Sequential(linear(6)), chunk=FEWEST - 1), x, y, 40) is None
    assert private_slots(BookKeeping(torch.nn.Sequential(linear(6)), chunk=FEWEST), x, y, 40) is not None
    assert private_slots(LinearGradients(linear(6)), x, y, 2**16 + 1) is None


def test_hashes_are_the_same_on_every_machine():
    """They decide the order of sums, and so the bits of what is repeated."""
    x = torch.arange(12, dtype=torch.float32).view(4, 3)
    found = slots_of(x, torch.arange(4), 1000).tolist()
    factors = np.random.SFC64(0).random_raw(2048) | np.uint64(1)
    words = np.concatenate([x.numpy().view(np.int32).astype(np.uint64), np.arange(4, dtype=np.uint64)[:, None]], 1)
    for row, slot in zip(words, found, strict=True):
        mixed = sum(int(a) * int(b) for a, b in zip(row, factors, strict=False)) % 2**64
        mixed = (mixed ^ mixed >> 32) * int(factors[0]) % 2**64
        assert slot == mixed // 2**32 % 1000


def test_an_example_changes_the_shape_of_one_block_of_a_linear_classifier(monkeypatch):
    """Blocks have a fixed number of slots, and together every row once, those of a crowded slot in the last."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "CACHED", 10 * LOAD * 8)  # ten slots
    x, y = torch.randn(3000, 8), torch.randint(2, (3000,))
    x[: SLOT + 1], y[: SLOT + 1] = x[0], y[0]
    gradients, shapes, sums = LinearGradients(linear(8, bias=True)), [], []
    for kept in (torch.ones(3000, dtype=torch.bool), torch.arange(3000) != 2000):
        slots = PrivateSlots(gradients, x[kept], y[kept], 3000)
        arranged = slots.arrange(x[kept], y[kept])
        blocks = list(slots.batch(None)[1].blocks(*arranged))
        assert len(blocks) == -(-slots.number // 10)
        shapes.append([len(block) for block in blocks])
        sums.append(sum(dp_sgd.clipped_sum(block, 1.0) for block in blocks))
        torch.testing.assert_close(sums[-1], dp_sgd.clipped_sum(gradients.matrix(*arranged), 1.0), rtol=1e-5, atol=1e-5)
    assert sorted(a - b for a, b in zip(*shapes, strict=True)) == [0] * (len(shapes[0]) - 1) + [1]
    assert (sums[0] - sums[1]).norm() <= ALLOWED
