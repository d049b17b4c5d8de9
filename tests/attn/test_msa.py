"""MiniMax Sparse Attention against its definition: the full score matrix under a mask.

Shapes: b batch, t tokens, h query heads, g KV heads, r = h/g, c head width, e index width, n blocks, k chosen blocks.
"""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import archlab.nn.align
import archlab.nn.select
import archlab.nn.sparse
import archlab.nn.tiles
from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.msa import MiniMaxSparseAttention
from archlab.errors import UsageError
from archlab.nn.align import block_recall
from archlab.nn.select import select_blocks
from archlab.nn.sparse import gathered_attention, tiled_attention

D_MODEL = 24

SIZES = {  # (block_size, top_k_blocks, n_heads, n_kv_heads, tokens)
    "several groups": (4, 3, 4, 2, 37),
    "odd blocks, three heads a group": (3, 2, 6, 3, 23),
    "the own block alone": (5, 1, 4, 1, 21),
    "single tokens": (1, 3, 2, 2, 9),
    "no sharing of heads": (7, 2, 4, 4, 50),
    "two blocks more than chosen": (4, 4, 4, 2, 24),
    "short last block": (8, 2, 2, 1, 25),
}


@pytest.fixture(params=["whole", "in pieces"])
def pieces(request, monkeypatch):
    """Also with every loop over pieces taking several turns."""
    if request.param == "in pieces":
        for module in (archlab.nn.select, archlab.nn.tiles, archlab.nn.align):
            monkeypatch.setattr(module, "SCORES_PER_PIECE", 300)
        monkeypatch.setattr(archlab.nn.sparse, "PARTIALS_PER_CHUNK", 2500)


def build(block_size=4, top_k_blocks=3, n_heads=4, n_kv_heads=2, *, dtype=torch.float64, seed=0, **settings):
    torch.manual_seed(seed)
    mixer = MiniMaxSparseAttention(
        D_MODEL,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=6,
        block_size=block_size,
        top_k_blocks=top_k_blocks,
        d_index=4,
        **settings,
    )
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.to(dtype).eval()


def inputs(t, *, batch=2, dtype=torch.float64, seed=1):
    return torch.randn(batch, t, D_MODEL, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def chosen_by_definition(index_q: Tensor, index_k: Tensor, block_size: int, top_k: int) -> list:
    """Sets of block numbers [b][g][i]: the own block, and the best of those before it, of equals the later ones."""
    scores = torch.einsum("btge,bse->bgts", index_q, index_k).detach()
    b, g, t, _ = scores.shape

    def choose(row: Tensor, i: int) -> set[int]:
        own = i // block_size
        best = [(row[j * block_size : (j + 1) * block_size].max().float().item(), j) for j in range(own)]
        return {own} | {j for _, j in sorted(best, reverse=True)[: top_k - 1]}

    return [[[choose(scores[x, y, i], i) for i in range(t)] for y in range(g)] for x in range(b)]


def mask_by_definition(index_q: Tensor, index_k: Tensor, block_size: int, top_k: int) -> Tensor:
    """Which tokens each query of each group attends to: bool (b g t t)."""
    chosen = chosen_by_definition(index_q, index_k, block_size, top_k)
    (b, t, g, _), device = index_q.shape, index_q.device
    mask = torch.zeros(b, g, t, t, dtype=torch.bool, device=device)
    for x in range(b):
        for y in range(g):
            for i in range(t):
                for j in chosen[x][y][i]:
                    mask[x, y, i, j * block_size : min((j + 1) * block_size, i + 1)] = True
    return mask


def by_definition(mixer: MiniMaxSparseAttention, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and divergence loss from the whole score matrix."""
    q, kv = mixer.project(x, 0)
    k, v = kv.repeat_interleave(mixer.n_heads // mixer.n_kv_heads, dim=1).chunk(2, dim=1)
    index_q, index_k = mixer.project_index(x.detach(), 0)
    if mask is None:
        mask = mask_by_definition(index_q, index_k, mixer.block_size, mixer.top_k_blocks)
    heads = mask.repeat_interleave(mixer.n_heads // mixer.n_kv_heads, dim=1)
    p = (q @ k.mT / math.sqrt(mixer.head_dim)).masked_fill(~heads, -math.inf).softmax(-1)
    y = mixer.out((p @ v).transpose(1, 2).flatten(2))
    teacher = p.detach().unflatten(1, (mixer.n_kv_heads, -1)).mean(2)
    scores = torch.einsum("btge,bse->bgts", index_q, index_k) / math.sqrt(mixer.d_index)
    student = scores.masked_fill(~mask, -math.inf).log_softmax(-1)
    divergence = teacher[mask] * (teacher[mask].log() - student[mask])
    return y, mixer.kl_coef * divergence.sum() / mask[..., 0].numel()


def state_with_nan(mixer, batch, max_len):
    state = mixer.init_state(batch, max_len, device=torch.device("cpu"), dtype=torch.float64)
    for tensor in state.tensors().values():
        tensor.fill_(math.nan)
    return state


@torch.no_grad()
def cached(mixer, x, pieces, *, room=0):
    state, pos, out = state_with_nan(mixer, len(x), x.shape[1] + room), 0, []
    for piece in x.split(pieces, dim=1):
        out.append(mixer(piece, pos=pos, state=state)[0])
        pos += piece.shape[1]
    return torch.cat(out, dim=1)


def assert_close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_outputs_loss_and_gradients_are_those_of_the_masked_score_matrix(sizes, pieces):
    *settings, t = sizes
    mixer = build(*settings, kl_coef=0.7).train()
    x = inputs(t).requires_grad_()
    y, aux = mixer(x)
    expected, divergence = by_definition(mixer, x)
    assert_close(y, expected)
    assert_close(aux["msa_kl"], divergence)
    weight, leaves = torch.randn_like(y), [x, *mixer.parameters()]
    gradients = torch.autograd.grad((y * weight).sum() + aux["msa_kl"], leaves)
    wanted = torch.autograd.grad((expected * weight).sum() + divergence, leaves)
    for actual, desired in zip(gradients, wanted, strict=True):
        assert_close(actual, desired)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_cached_in_any_pieces_is_one_pass(sizes, pieces):
    *settings, t = sizes
    mixer = build(*settings)
    x = inputs(t)
    expected, _ = by_definition(mixer, x)
    for split in ([1] * t, [t], [2] * (t // 2) + [t % 2] * (t % 2), [t // 2 + 1, 1, 1, t - t // 2 - 3], [3, t - 3]):
        for room in (0, 1, 30):
            assert_close(cached(mixer, x, split, room=room), expected)


@pytest.mark.parametrize("t", [1, 2, 15, 16, 17])
def test_with_every_block_chosen_it_is_grouped_query_attention(t):
    mixer = build(4, 5).train()
    dense = GroupedQueryAttention(D_MODEL, n_heads=4, n_kv_heads=2, head_dim=6).double()
    dense.load_state_dict({name: w for name, w in mixer.state_dict().items() if name in dense.state_dict()})
    x = inputs(t)
    y, aux = mixer(x)
    assert_close(y, dense(x)[0], tolerance=0)
    causal = torch.ones(t, t, dtype=torch.bool).tril().expand(2, 2, t, t)
    expected, divergence = by_definition(mixer, x, mask=causal)
    assert_close(y, expected)
    assert_close(aux["msa_kl"], divergence)
    assert_close(cached(mixer, x, [1] * t), y)


def test_one_block_is_block_diagonal_attention():
    mixer = build(4, 1)
    x = inputs(19)
    block = torch.arange(19) // 4
    mask = (block[:, None] == block) & torch.ones(19, 19, dtype=torch.bool).tril()
    assert_close(mixer(x)[0], by_definition(mixer, x, mask=mask.expand(2, 2, 19, 19))[0])


@pytest.mark.parametrize("t", range(1, 13))
def test_more_blocks_asked_for_than_there_are(t):
    mixer = build(4, 16).train()
    x = inputs(t).requires_grad_()
    y, aux = mixer(x)
    (y.square().sum() + aux["msa_kl"]).backward()
    assert all(p.grad.isfinite().all() for p in [x, *mixer.parameters()])
    assert_close(y, by_definition(mixer, x)[0])


def test_selection_is_the_definition_for_every_way_to_state_the_position():
    index_q = torch.randn(3, 33, 2, 4, dtype=torch.float64)
    index_k = torch.randn(3, 33, 4, dtype=torch.float64)
    expected = chosen_by_definition(index_q, index_k, 4, 3)
    whole = select_blocks(index_q, index_k, 0, block_size=4, top_k=3)
    assert (whole[..., 0] == torch.arange(33)[:, None] // 4).all()
    for i in range(33):
        for pos in (i, torch.full((3,), i)):
            one = select_blocks(index_q[:, i : i + 1], index_k[:, : i + 1], pos, block_size=4, top_k=3)[:, 0]
            for x in range(3):
                for y in range(2):
                    for found in (whole[x, i, y], one[x, y]):
                        blocks = [j for j in found.tolist() if j >= 0]
                        assert set(blocks) == expected[x][y][i]
                        assert len(blocks) == len(set(blocks)) == min(3, i // 4 + 1)


def test_a_later_token_changes_neither_outputs_nor_choices_before_it():
    mixer = build(4, 2)
    x = inputs(22, batch=1)
    y = mixer(x)[0]
    index_q, index_k = mixer.project_index(x, 0)
    choice = select_blocks(index_q, index_k, 0, block_size=4, top_k=2).sort(-1).values
    for p in range(1, 22):
        for stop in (p + 1, 22):
            changed = x.clone()
            changed[:, p:stop] = 10 * inputs(22, batch=1, seed=p)[:, p:stop]
            assert torch.equal(mixer(changed)[0][:, :p], y[:, :p])
            after = select_blocks(*mixer.project_index(changed, 0), 0, block_size=4, top_k=2).sort(-1).values
            assert torch.equal(after[:, :p], choice[:, :p])


def test_groups_choose_for_themselves():
    index_q, index_k = torch.randn(1, 30, 3, 4), torch.randn(1, 30, 4)
    choice = select_blocks(index_q, index_k, 0, block_size=3, top_k=3).sort(-1).values
    others = index_q.clone()
    others[:, :, 1:] = torch.randn(1, 30, 2, 4)
    changed = select_blocks(others, index_k, 0, block_size=3, top_k=3).sort(-1).values
    assert torch.equal(changed[:, :, 0], choice[:, :, 0])
    assert not torch.equal(changed[:, :, 1:], choice[:, :, 1:])
    assert not torch.equal(choice[:, :, 0], choice[:, :, 1])


def test_of_equal_scores_the_later_block_wins_however_the_tokens_arrive():
    index_q, index_k = torch.randn(2, 40, 2, 4), torch.randn(1, 4).expand(2, 40, 4)
    choice = select_blocks(index_q, index_k, 0, block_size=4, top_k=3)
    for i in range(40):
        latest = {i // 4, max(0, i // 4 - 1), max(0, i // 4 - 2)}
        assert {j for j in choice[0, i, 1].tolist() if j >= 0} == latest
    mixer = build(4, 3)
    nn.init.zeros_(mixer.index.weight)
    x = inputs(30)
    assert_close(cached(mixer, x, [7] + [1] * 23), mixer(x)[0])


def test_scores_of_any_sign_and_size_keep_their_order():
    scores = torch.tensor([0.0, 0.0, -1e-30, 1e-30, -3e38, 3e38, -math.inf, math.inf, -1.0, 1.0, 1.0 + 2**-23])
    keys = torch.cat([scores, scores[:1]])[None, :, None]
    for top_k in range(2, 12):
        found = select_blocks(torch.ones(1, 1, 1, 1), keys, 11, block_size=1, top_k=top_k)[0, 0, 0, 1:]
        order = sorted(range(11), key=lambda j: (scores[j].item(), j), reverse=True)
        assert set(found.tolist()) == set(order[: top_k - 1])


def test_ragged_rows_take_any_number_of_tokens():
    mixer = build(3, 2)
    starts, t, extra = [1, 19, 8], 30, 6
    x = inputs(t, batch=3)
    expected = mixer(x)[0]
    state = mixer.init_state(3, t, device=x.device, dtype=x.dtype)
    for tensor in state.tensors().values():
        tensor.fill_(50.0)
    for row, start in enumerate(starts):
        alone = mixer.init_state(1, t, device=x.device, dtype=x.dtype)
        mixer(x[row : row + 1, :start], pos=0, state=alone)
        state.kv[row, :, :start], state.index_k[row, :start] = alone.kv[0, :, :start], alone.index_k[0, :start]
    new = torch.stack([x[row, start : start + extra] for row, start in enumerate(starts)])
    y, _ = mixer(new, pos=torch.tensor(starts), state=state)
    for row, start in enumerate(starts):
        assert_close(y[row], expected[row, start : start + extra])


def test_divergence_has_its_closed_form_gradient(pieces):
    """dS = (student - teacher) / (N * Hkv), the teacher a mean of probabilities, scores scaled by 1/sqrt(d_index)."""
    b, h, g, t, c, e = 2, 6, 3, 26, 5, 4
    q, k, v = (torch.randn(b, n, t, c, dtype=torch.float64) for n in (h, g, g))
    index_q = torch.randn(b, t, g, e, dtype=torch.float64, requires_grad=True)
    index_k = torch.randn(b, t, e, dtype=torch.float64, requires_grad=True)
    mask = mask_by_definition(index_q, index_k, 4, 3)
    blocks = select_blocks(index_q, index_k, 0, block_size=4, top_k=3)
    _, divergence = tiled_attention(q, k, v, blocks, 0, block_size=4, index=(index_q, index_k))
    dq, dk = torch.autograd.grad(divergence / (b * t * g), (index_q, index_k))
    scores = q @ k.repeat_interleave(2, 1).mT / c**0.5
    teacher = scores.masked_fill(~mask.repeat_interleave(2, 1), -math.inf).softmax(-1).unflatten(1, (g, 2)).mean(2)
    scores = torch.einsum("btge,bse->bgts", index_q, index_k) / e**0.5
    dscores = (scores.masked_fill(~mask, -math.inf).softmax(-1) - teacher) / (b * t * g)
    assert_close(dq, torch.einsum("bgts,bse->btge", dscores, index_k) / e**0.5)
    assert_close(dk, torch.einsum("bgts,btge->bse", dscores, index_q) / e**0.5)


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_each_loss_reaches_its_own_parameters_alone(progress):
    mixer = build(index_norm=True, qk_norm=True, warmup=0.5).train()
    mixer.after_step(progress)
    x = inputs(30).requires_grad_()
    y, aux = mixer(x)
    parameters = dict(mixer.named_parameters()) | {"x": x}
    for loss, index_learns in ((y.square().sum(), False), (aux["msa_kl"], True)):
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
        for name, grad in zip(parameters, grads, strict=True):
            assert (grad is not None and grad.abs().max() > 0) == (name.startswith("index") == index_learns), name


def test_dense_warmup_follows_progress_alone():
    mixer = build(warmup=0.25).train()
    dense = GroupedQueryAttention(D_MODEL, n_heads=4, n_kv_heads=2, head_dim=6).double()
    dense.load_state_dict({name: w for name, w in mixer.state_dict().items() if name in dense.state_dict()})
    x = inputs(30)
    causal = torch.ones(30, 30, dtype=torch.bool).tril().expand(2, 2, 30, 30)
    sparse, all_tokens = by_definition(mixer, x), by_definition(mixer, x, mask=causal)
    assert_close(mixer(x)[0], sparse[0])
    for progress, (expected, divergence) in [
        (0.0, all_tokens),
        (0.24, all_tokens),
        (0.24, all_tokens),
        (0.25, sparse),
        (1.0, sparse),
        (0.1, all_tokens),
    ]:
        mixer.after_step(progress)
        y, aux = mixer(x)
        assert_close(y, expected)
        assert_close(aux["msa_kl"], divergence)
        assert_close(cached(mixer, x, [9] + [1] * 21), expected)
    assert_close(y, dense(x)[0])


def test_the_loss_does_not_grow_with_the_batch():
    mixer = build().train()
    x = inputs(30, batch=1)
    assert_close(mixer(x.expand(5, -1, -1))[1]["msa_kl"], mixer(x)[1]["msa_kl"])


def test_recall_is_that_of_the_blocks_with_most_attention():
    torch.manual_seed(3)
    b, h, g, t, block_size, top_k = 1, 4, 2, 27, 4, 3
    q, k = torch.randn(b, h, t, 5), torch.randn(b, g, t, 5)
    index_q, index_k = torch.randn(b, t, g, 4), torch.randn(b, t, 4)
    chosen = chosen_by_definition(index_q, index_k, block_size, top_k)
    hits, shares = [], []
    scores = q @ k.repeat_interleave(h // g, 1).mT / 5**0.5
    p = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -math.inf).softmax(-1)
    for y in range(g):
        for i in range(top_k * block_size, t):
            row = p[0, 2 * y : 2 * y + 2, i].mean(0)
            mass = {j: row[j * block_size : (j + 1) * block_size].sum().item() for j in range(i // block_size + 1)}
            best = sorted(mass, key=mass.get, reverse=True)[:top_k]
            hits.append(len(chosen[0][y][i] & set(best)) / top_k)
            shares.append(sum(mass[j] for j in best if j in chosen[0][y][i]) / sum(mass[j] for j in best))
    recall = block_recall(index_q, index_k, q, k, block_size=block_size, top_k=top_k)
    assert_close(recall, torch.tensor([sum(hits) / len(hits), sum(shares) / len(shares)]), tolerance=1e-5)


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_metrics_come_from_training_alone(progress):
    mixer = build(warmup=0.5)
    mixer.after_step(progress)
    assert mixer(inputs(30))[1] == {}
    cached(mixer.train(), inputs(30), [30])
    assert mixer.metrics() == {}
    mixer(inputs(12))
    assert mixer.metrics() == {}, "no query sees more blocks than it may choose"
    mixer(inputs(30))
    metrics = mixer.metrics()
    assert sorted(metrics) == ["msa_block_recall", "msa_score_recall"]
    assert all(0 < value <= 1 and isinstance(value, float) for value in metrics.values())
    mixer.eval()(inputs(30, seed=7))
    assert mixer.metrics() == metrics


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returned."""

    def __enter__(self):
        self.elements = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_the_work_grows_with_the_chosen_tokens_not_with_the_context():
    """Products counted in the forward and backward pass: those of the chosen tokens, and at most a quarter more for
    tiles that are not full."""
    h, g, c, block_size, top_k = 4, 2, 8, 8, 4
    for t in (256, 1024):
        q, k, v = (torch.randn(1, n, t, c, requires_grad=True) for n in (h, g, g))
        index = torch.randn(1, t, g, 4), torch.randn(1, t, 4)
        blocks = select_blocks(*index, 0, block_size=block_size, top_k=top_k)
        forward = 4 * h * c * t * block_size * top_k
        y = tiled_attention(q, k, v, blocks, 0, block_size=block_size)[0]
        assert flops(lambda: tiled_attention(q, k, v, blocks, 0, block_size=block_size)) < 1.25 * forward  # noqa: B023
        assert flops(lambda: y.sum().backward()) < 1.25 * 2.5 * forward  # noqa: B023


def test_no_score_matrix_is_ever_held(monkeypatch):
    t = 2048
    mixer = build(8, 2, dtype=torch.float32).train()
    for module in (archlab.nn.select, archlab.nn.align):
        monkeypatch.setattr(module, "SCORES_PER_PIECE", 1 << 16)
    x = inputs(t, batch=1, dtype=torch.float32)
    with Largest() as largest:
        y, aux = mixer(x)
        (y.sum() + aux["msa_kl"]).backward()
    assert largest.elements < t * t / 8


def test_a_decode_step_reads_the_same_number_of_tokens_at_any_length():
    largest = {}
    for length in (64, 1024):
        slots = torch.randn(1, 4, length, 6)
        blocks = torch.randint(length // 8, (1, 1, 2, 3))
        with Largest() as seen:
            rows = torch.randn(1, 4, 1, 6)
            gathered_attention(rows, slots.clone(), blocks, length - 1, length=length, block_size=8)
        largest[length] = seen.elements - slots.numel()
    assert largest[1024] <= 0, "something larger than the cache was made"
    mixer = build(8, 3)
    x = inputs(200, batch=1)
    state = state_with_nan(mixer, 1, 200)
    with torch.no_grad():
        mixer(x[:, :199], state=state)
        attended = [slots_that_matter(mixer, x, state, head) for head in range(2)]
    assert all(0 < len(slots) <= 3 * 8 for slots in attended)
    assert all(199 in slots for slots in attended)


def slots_that_matter(mixer, x, state, head) -> set[int]:
    """Slots of a KV head whose value changes the output of a decode step."""
    y = mixer(x[:, 199:], pos=199, state=state)[0]
    found = set()
    for slot in range(200):
        changed = state.clone()
        changed.v[:, head, slot] += 1
        if slot == 199:
            found.add(slot)  # written by the step itself, so always read
        elif not torch.equal(mixer(x[:, 199:], pos=199, state=changed)[0], y):
            found.add(slot)
    return found


def test_bfloat16_chooses_by_float32_scores():
    mixer = build(4, 3, dtype=torch.float32)
    x = inputs(40, dtype=torch.float32)
    index_q, index_k = (z.bfloat16() for z in mixer.project_index(x, 0))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = select_blocks(index_q, index_k, 0, block_size=4, top_k=3)
    assert torch.equal(narrow, select_blocks(index_q.float(), index_k.float(), 0, block_size=4, top_k=3))
    mixer.train()
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = mixer(x)
        (y.float().square().sum() + aux["msa_kl"]).backward()
    assert y.dtype == torch.bfloat16
    assert aux["msa_kl"].dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_nan_weights_are_no_crash():
    mixer = build().train()
    y, aux = mixer(inputs(30) * math.nan)
    (y.sum() + aux["msa_kl"]).backward()
    assert y.isnan().all()


def test_shapes_are_known_without_data():
    with torch.device("meta"):
        mixer = build(warmup=0.5).train()
        x = torch.empty(2, 30, D_MODEL, dtype=torch.float64, requires_grad=True)
    for progress in (0.0, 1.0):
        mixer.after_step(progress)
        y, aux = mixer(x)
        (y.sum() + aux["msa_kl"]).backward()
        assert y.shape == x.shape == x.grad.shape


def test_repeated_passes_give_the_same_bits():
    mixer = build(dtype=torch.float32).train()
    x = inputs(40, dtype=torch.float32)

    def gradients() -> list[Tensor]:
        y, aux = mixer(x)
        return [y, *torch.autograd.grad(y.square().sum() + aux["msa_kl"], list(mixer.parameters()))]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_index_settings_do_what_they_say():
    x = inputs(30)
    normed = build(index_norm=True)
    before = normed(x)[0]
    normed.index.weight.data *= 10
    assert_close(normed(x)[0], before, tolerance=1e-4)
    same = x[:, :1].expand(-1, 30, -1)
    _, still = build(index_rope_dim=0).project_index(same, 0)
    _, half = build(index_rope_dim=2).project_index(same, 0)
    assert_close(still[:, 0], still[:, 9])
    assert_close(half[:, 0, 2:], half[:, 9, 2:])
    assert not torch.allclose(half[:, 0, :2], half[:, 9, :2])


def published(**settings) -> MiniMaxSparseAttention:
    with torch.device("meta"):
        sizes = {"n_heads": 64, "n_kv_heads": 4, "head_dim": 128, "block_size": 128, "top_k_blocks": 16, "d_index": 128}
        return MiniMaxSparseAttention(6144, **sizes | settings)


def total_flops(mixer, n: int) -> int:
    """Summed over the n tokens of a pass; mix_flops is linear on both sides of k * B."""
    bend = min(n, mixer.top_k_blocks * mixer.block_size) if isinstance(mixer, MiniMaxSparseAttention) else n
    pieces = [(1, bend), (bend + 1, n)]
    return sum((mixer.mix_flops(lo) + mixer.mix_flops(hi)) * (hi - lo + 1) // 2 for lo, hi in pieces if hi >= lo)


def test_flops_give_the_published_ratios():
    mixer = published()
    with torch.device("meta"):
        dense = GroupedQueryAttention(6144, n_heads=64, n_kv_heads=4, head_dim=128)
    far = 1 << 30
    scan = mixer.mix_flops(far + 1) - mixer.mix_flops(far)
    attended = mixer.mix_flops(far) - scan * far
    assert (scan, attended) == (2 * 4 * 128, 4 * 64 * 128 * 2048)

    def unclipped_ratio(n: int) -> float:
        return dense.mix_flops(1) * n**2 / 2 / (scan * n**2 / 2 + attended * n)

    table = {8: 1.88, 32: 6.40, 64: 10.67, 128: 16.00, 256: 21.33, 512: 25.60, 1024: 28.44}
    assert {kib: round(unclipped_ratio(kib * 1024), 2) for kib in table} == table
    assert round(unclipped_ratio(10**6), 2) == 28.29
    assert unclipped_ratio(4228) < 1 < unclipped_ratio(4229)
    assert round(dense.mix_flops(far) / mixer.mix_flops(far)) == 32
    for n in (1, 100, 2048):
        assert total_flops(mixer, n) == total_flops(dense, n) + scan * n * (n + 1) // 2
    saved = 4 * 64 * 128 * 2048 * 2047 // 2  # by the first 2048 tokens, which see fewer than that
    n = 1 << 20
    assert total_flops(mixer, n) == scan * n * (n + 1) // 2 + attended * n - saved
    assert mixer.decode_flops(2048) == dense.mix_flops(2048)
    assert mixer.decode_flops(2049) == mixer.mix_flops(2049)


def test_cache_holds_keys_values_and_one_index_key_a_token():
    mixer = published()

    def stored(max_len: int) -> int:
        return mixer.init_state(1, max_len, device=torch.device("meta"), dtype=torch.bfloat16).nbytes

    assert [stored(n) for n in (1, 100, 4097)] == [2 * 1152 * n for n in (1, 100, 4097)]
    assert mixer.read_bytes(2048, 2) == 2 * 1024 * 2048
    assert mixer.read_bytes(2049, 2) == 2 * (128 * 2049 + 1024 * 2048)
    n = 1 << 20
    assert round(2 * 1024 * n / mixer.read_bytes(n, 2), 2) == 7.88


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"top_k_blocks": 0}, "top_k_blocks=0"),
        ({"d_index": 0}, "d_index=0"),
        ({"index_rope_dim": 3}, "index_rope_dim=3"),
        ({"index_rope_dim": 130}, "index_rope_dim=130"),
        ({"warmup": 1.5}, "warmup=1.5"),
        ({"n_kv_heads": 5}, "n_kv_heads=5"),
    ],
)
def test_impossible_settings_get_a_sentence(settings, named):
    with pytest.raises(UsageError, match=named):
        published(**settings)
