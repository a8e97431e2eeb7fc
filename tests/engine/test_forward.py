"""The packed pass over the paged pool computes what the model computes by itself."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from engine.model import Model, SequenceSlice, load_model, make_pool
from tests.engine import tiny

_BLOCK_TOKENS = 4
_BLOCKS_PER_SEQUENCE = 20


@pytest.fixture(
    scope="module", params=[tiny.llama, tiny.qwen2, tiny.qwen3, tiny.mistral], ids=lambda make: make.__name__
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: PretrainedConfig = request.param()
    return tiny.write_folder(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, "cpu", "float32")


@pytest.fixture(scope="module")
def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def pool(model: Model) -> torch.Tensor:
    """Poisoned: whatever is attended to without having been written makes the logits NaN."""
    return make_pool(model.spec, 4 * _BLOCKS_PER_SEQUENCE, _BLOCK_TOKENS, "cpu").fill_(float("nan"))


def test_packed_chunked_sequences_give_the_tokens_of_plain_generate(
    model: Model, plain: torch.nn.Module, pool: torch.Tensor
) -> None:
    prompts = [_tokens(count, seed=count) for count in (1, 7, 30, 41)]
    chunks = (1, 7, 9, 16)
    num_new = 10
    tables = _tables(len(prompts))
    sequences = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)

    def unfinished() -> list[int]:
        return [i for i, prompt in enumerate(prompts) if len(sequences[i]) < len(prompt) + num_new]

    # Sequences are at different points of prefill and decode in the same step, and leave one by one.
    while members := unfinished():
        slices = []
        for i in members:
            piece = sequences[i][done[i] : done[i] + chunks[i]]
            slices.append(SequenceSlice(piece, done[i], tables[i]))
            done[i] += len(piece)
        logits = model.forward(slices, pool)
        for i, row in zip(members, logits, strict=True):
            if done[i] == len(sequences[i]):
                sequences[i].append(int(row.argmax()))

    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence == _generate(plain, prompt, num_new)


def test_logits_are_those_of_the_plain_model_up_to_rounding(
    model: Model, plain: torch.nn.Module, pool: torch.Tensor
) -> None:
    tokens = _tokens(33)
    table = _tables(1)[0]
    model.forward([SequenceSlice(tokens[:20], 0, table)], pool)
    paged = model.forward([SequenceSlice(tokens[20:], 20, table)], pool)
    with torch.inference_mode():
        own = plain(torch.tensor([tokens])).logits[:, -1].float()
    torch.testing.assert_close(paged, own, rtol=1e-4, atol=1e-4)


def test_a_prefix_copied_to_other_pool_blocks_continues_the_same(model: Model, pool: torch.Tensor) -> None:
    tokens = _tokens(30)
    first, second = _tables(2)
    model.forward([SequenceSlice(tokens[:24], 0, first)], pool)
    expected = model.forward([SequenceSlice(tokens[24:], 24, first)], pool)
    pool[list(second[:6])] = pool[list(first[:6])]
    again = model.forward([SequenceSlice(tokens[24:], 24, second)], pool)
    assert torch.equal(expected, again)


def test_what_is_cached_of_a_layer_is_read_only_after_it_was_waited_for(model: Model, pool: torch.Tensor) -> None:
    tokens, (table,) = _tokens(30), _tables(1)
    prefix = list(table[:6])
    model.forward([SequenceSlice(tokens[:24], 0, table)], pool)
    expected = model.forward([SequenceSlice(tokens[24:], 24, table)], pool)
    kept = pool.clone()
    pool[prefix] = float("nan")

    def arrive(layer: int) -> None:
        pool[prefix, layer] = kept[prefix, layer]

    again = model.forward([SequenceSlice(tokens[24:], 24, table, True, arrive)], pool)
    assert torch.equal(expected, again)


def test_two_sequences_may_read_the_same_blocks_of_a_shared_prefix(model: Model, pool: torch.Tensor) -> None:
    shared = _tokens(16)
    tails = [_tokens(5, seed=5), _tokens(9, seed=6)]
    first, second = _tables(2)
    second = [*first[:4], *second[4:]]
    model.forward([SequenceSlice(shared, 0, first)], pool)
    together = model.forward([SequenceSlice(tails[0], 16, first), SequenceSlice(tails[1], 16, second)], pool)
    alone = _tables(3)[2]
    for row, tail in zip(together, tails, strict=True):
        own = model.forward([SequenceSlice([*shared, *tail], 0, alone)], pool)[0]
        torch.testing.assert_close(row, own, rtol=1e-4, atol=1e-4)


def test_computing_the_same_chunks_again_is_bitwise_equal(model: Model, pool: torch.Tensor) -> None:
    """What a resume rests on: blocks that were loaded equal blocks that are computed on the same chunk grid."""
    tokens = _tokens(48)
    first, second = _tables(2)
    for start in range(0, 48, 16):
        model.forward([SequenceSlice(tokens[start : start + 16], start, first)], pool)
    for start in range(0, 48, 16):
        model.forward([SequenceSlice(tokens[start : start + 16], start, second)], pool)
    assert torch.equal(pool[first[:12]], pool[second[:12]])


def test_a_step_writes_only_the_rows_of_its_own_tokens(model: Model, pool: torch.Tensor) -> None:
    table = _tables(1)[0]
    model.forward([SequenceSlice(_tokens(6), 0, table)], pool)
    written = ~pool.isnan().all(dim=-1)
    assert bool(written[table[0]].all())
    assert bool(written[table[1], :, :, :2].all())
    assert int(written.sum()) == 6 * model.spec.num_layers * 2 * model.spec.num_kv_heads


def test_the_cached_keys_come_layer_by_layer_in_the_documented_layout(
    model: Model, plain: torch.nn.Module, pool: torch.Tensor
) -> None:
    tokens = _tokens(8)
    table = _tables(1)[0]
    model.forward([SequenceSlice(tokens, 0, table)], pool)
    with torch.inference_mode():
        cache = plain(torch.tensor([tokens]), use_cache=True).cache
    for layer in range(model.spec.num_layers):
        for part, own in ((0, cache.layers[layer].keys), (1, cache.layers[layer].values)):
            paged = pool[table[:2], layer, part].reshape(8, model.spec.num_kv_heads, model.spec.head_dim)
            torch.testing.assert_close(paged.transpose(0, 1), own[0], rtol=1e-4, atol=1e-4)


def test_a_slice_that_wants_no_logits_gets_a_row_of_nan_and_changes_no_other(model: Model, pool: torch.Tensor) -> None:
    tables = _tables(3)
    slices = [SequenceSlice(_tokens(5, seed=i), 0, tables[i]) for i in range(3)]
    every = model.forward(slices, pool)
    quiet = SequenceSlice(slices[1].token_ids, 0, tables[1], wants_logits=False)
    some = model.forward([slices[0], quiet, slices[2]], pool)
    assert bool(some[1].isnan().all())
    torch.testing.assert_close(some[[0, 2]], every[[0, 2]])
    assert bool(model.forward([quiet], pool).isnan().all())


def _tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCAB_SIZE, (count,), generator=generator).tolist()


def _tables(count: int) -> list[list[int]]:
    """Block tables in no order, as an allocator leaves them after a while."""
    blocks = torch.randperm(4 * _BLOCKS_PER_SEQUENCE, generator=torch.Generator().manual_seed(7)).tolist()
    return [blocks[i * _BLOCKS_PER_SEQUENCE : (i + 1) * _BLOCKS_PER_SEQUENCE] for i in range(count)]


def _generate(plain: torch.nn.Module, prompt: list[int], num_new: int) -> list[int]:
    ids = torch.tensor([prompt])
    plain.generation_config.eos_token_id = None
    output = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
    return output[0].tolist()
