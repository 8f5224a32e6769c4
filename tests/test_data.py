"""Encoding, packing, resuming, evaluation prompts: nothing is cut, lost, repeated or supervised by mistake."""

import collections
import dataclasses
import hashlib
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models

from smmd_jax.errors import TokenRangeError
from smmd_jax.numeric_vocab import numeric_vocab_from_tokenizer
from train.data import Batch, make_batches
from train.encode import encode, encode_source
from train.exits import DataError
from train.prompts import make_prompt_batches
from train.tasks.base import Example
from train.tokenizer import Tokenizer, make_task_tokenizer

TOKENIZER = make_task_tokenizer()
# All but the images, which a data set of text has none of.
TEXT_FIELDS = [field for field in dataclasses.fields(Batch) if field.name != "images"]


class ListSource:
    """Examples held in a list."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.fingerprint = hashlib.sha256(repr(pairs).encode()).hexdigest()
        self.reads = 0
        self._examples = [Example(key=f"key-{i}", prompt=p, answer=a) for i, (p, a) in enumerate(pairs)]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        self.reads += 1
        return self._examples[index]


# Prompts of 2 to 11 tokens with unlike answers, so that rows fill unevenly.
SOURCE = ListSource([("1" * (1 + 7 * i % 10) + "\n", str(i * 37 - 400)) for i in range(41)])


def batches(source=SOURCE, *, batch_size=4, max_length=24, seed=3, **more):
    return make_batches(source, TOKENIZER, batch_size=batch_size, max_length=max_length, seed=seed, **more)


def toy_tokenizer(vocabulary: dict[str, int], merges=(), *, eos="end", pad=None) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.add_special_tokens([AddedToken(eos, special=True)])
    return Tokenizer(backend, eos_token=eos, pad_token=pad)


def test_prompt_is_input_and_answer_with_its_end_is_target():
    ids, supervised = encode(Example(key="k", prompt="12\n", answer="-7"), TOKENIZER)
    assert [TOKENIZER.decode([i]) for i in ids[:-1]] == ["1", "2", "\n", "-", "7"] and ids[-1] == TOKENIZER.eos_id
    assert supervised.tolist() == [False, False, False, True, True, True]
    encoded = encode_source(ListSource([("12\n", "-7")]), TOKENIZER, max_length=5)
    assert encoded.input_ids.tolist() == ids[:-1].tolist()
    assert encoded.targets.tolist() == ids[1:].tolist()
    assert encoded.target_mask.tolist() == [False, False, True, True, True]


def test_a_merge_across_the_seam_does_not_swallow_the_answer():
    vocabulary = {"1": 0, "+": 1, "3": 2, "=": 3, "4": 4, "=4": 5, "end": 6}
    tokenizer = toy_tokenizer(vocabulary, [("=", "4")])
    assert tokenizer.encode("1+3=4") == [0, 1, 2, 5]  # the joint encoding has no token "4"
    ids, supervised = encode(Example(key="k", prompt="1+3=", answer="4"), tokenizer)
    assert ids.tolist() == [0, 1, 2, 3, 4, 6]
    assert ids[supervised].tolist() == [4, 6]


def test_token_zero_and_an_end_of_sequence_that_pads_are_supervised():
    # "4" is token 0, and padding is the end-of-sequence token: masks must come from lengths.
    tokenizer = toy_tokenizer({"4": 0, "=": 1, "end": 2})
    assert tokenizer.pad_id == tokenizer.eos_id == 2
    stream = make_batches(ListSource([("=", "44")]), tokenizer, batch_size=1, max_length=5, seed=0, pack=False)
    batch = next(stream)
    assert batch.input_ids.tolist() == [[1, 0, 0, 2, 2]]
    assert batch.targets[batch.target_mask].tolist() == [0, 0, 2]
    assert batch.target_mask.tolist() == [[True, True, True, False, False]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0, 0]]


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="key-0 has an empty prompt"):
        encode_source(ListSource([("", "4")]), TOKENIZER, max_length=9)
    with pytest.raises(DataError, match="empty prompt"):
        encode(Example(key="k", prompt="", answer="4"), TOKENIZER)


@pytest.mark.parametrize(("answer", "dropped"), [("123", 0), ("1234", 0), ("12345", 1)])
def test_only_examples_beyond_the_row_are_dropped_and_none_is_cut(answer, dropped):
    # Prompt of 2 tokens: 2 + len(answer) positions in a row of 6.
    source = ListSource([("7\n", "1")] * 200 + [("7\n", answer)])
    encoded = encode_source(source, TOKENIZER, max_length=6)
    statistics = encoded.statistics()
    assert (statistics.examples, statistics.dropped) == (201 - dropped, dropped)
    assert statistics.longest == 2 + len(answer)
    assert encoded.dropped_keys == ("key-200",) * dropped
    assert statistics.supervised_tokens == 200 * 2 + (1 - dropped) * (len(answer) + 1)
    assert len(encoded.source_index) == len(encoded) == 201 - dropped


def test_too_many_long_examples_are_refused_with_the_way_out():
    source = ListSource([("7\n", "1" * (1 + index % 10)) for index in range(100)])
    with pytest.raises(DataError) as caught:
        encode_source(source, TOKENIZER, max_length=9)
    message = str(caught.value)
    assert "30 of 100 examples" in message
    assert "key-7, key-8, key-9" in message
    assert "max_length=12 is the smallest" in message
    assert len(encode_source(source, TOKENIZER, max_length=12)) == 100
    assert len(encode_source(source, TOKENIZER, max_length=9, max_dropped_fraction=0.3)) == 70


@pytest.mark.parametrize("fraction", [0.01, 1.0])
def test_no_examples_is_refused(fraction):
    with pytest.raises(DataError, match="no examples"):
        encode_source(ListSource([]), TOKENIZER, max_length=9, max_dropped_fraction=fraction)
    with pytest.raises(DataError, match="1 of 1 examples"):
        encode_source(ListSource([("1\n", "1" * 50)]), TOKENIZER, max_length=9, max_dropped_fraction=fraction)


def test_statistics_count_supervised_and_numeric_tokens():
    source = ListSource([("99\n", "-12"), ("8\n", "x")])
    numeric_ids = np.asarray(numeric_vocab_from_tokenizer(TOKENIZER.backend).token_ids)
    statistics = encode_source(source, TOKENIZER, max_length=9).statistics(numeric_ids)
    assert statistics.supervised_tokens == 4 + 2  # - 1 2 eos; x eos
    assert statistics.numeric_tokens == 2  # prompts do not count
    assert (statistics.supervised_per_example, statistics.numeric_per_example) == (3.0, 1.0)
    assert (statistics.positions, statistics.mean_length, statistics.longest) == (6 + 3, 4.5, 6)
    assert encode_source(source, TOKENIZER, max_length=9).statistics().numeric_per_example is None


def test_a_cached_encoding_equals_a_fresh_one_and_reads_no_example(tmp_path):
    source = ListSource([("7\n", "1" * (1 + index % 10)) for index in range(100)])
    arguments = {"max_length": 9, "max_dropped_fraction": 0.5}
    fresh = encode_source(source, TOKENIZER, **arguments, cache_dir=str(tmp_path))
    source.reads = 0
    cached = encode_source(source, TOKENIZER, **arguments, cache_dir=str(tmp_path))
    assert source.reads == 0
    for field in dataclasses.fields(fresh):
        np.testing.assert_array_equal(getattr(cached, field.name), getattr(fresh, field.name))
    assert cached.fingerprint() == fresh.fingerprint()
    with pytest.raises(DataError, match="30 of 100"):  # refused from the cache as well
        encode_source(source, TOKENIZER, max_length=9, cache_dir=str(tmp_path))
    encode_source(source, TOKENIZER, max_length=12, cache_dir=str(tmp_path))
    assert source.reads == 100
    assert len(list(tmp_path.iterdir())) == 2


def segments_of(batch: Batch, examples: np.ndarray):
    """(example, input ids, targets, mask, positions) of every segment, row by row."""
    for row in range(batch.input_ids.shape[0]):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            here = batch.segment_ids[row] == segment
            (example,) = set(examples[row, here].tolist())
            yield (
                example,
                batch.input_ids[row, here],
                batch.targets[row, here],
                batch.target_mask[row, here],
                batch.positions[row, here],
            )


@pytest.mark.parametrize("pack", [True, False])
def test_every_segment_is_one_whole_example(pack):
    stream = batches(pack=pack)
    for _ in range(30):
        batch = next(stream)
        for example, inputs, targets, mask, positions in segments_of(batch, stream.examples):
            ids, supervised = encode(SOURCE[example], TOKENIZER)
            assert inputs.tolist() == ids[:-1].tolist() and targets.tolist() == ids[1:].tolist()
            assert mask.tolist() == supervised[1:].tolist()
            assert positions.tolist() == list(range(len(inputs)))
        padding = batch.segment_ids == 0
        assert (batch.input_ids[padding] == TOKENIZER.pad_id).all() and not batch.target_mask[padding].any()
        assert (stream.examples[padding] == -1).all() and (stream.examples[~padding] >= 0).all()
        assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # padding only at the end of a row
        assert pack or batch.segment_ids.max() == 1


def test_batches_have_the_shapes_and_types_of_the_contract():
    batch = next(batches())
    assert batch.images is None
    for field in TEXT_FIELDS:
        array = getattr(batch, field.name)
        assert isinstance(array, np.ndarray) and array.shape == (4, 24)
        assert array.dtype == (bool if field.name == "target_mask" else np.int32)


@pytest.mark.parametrize("pack", [True, False])
def test_no_example_comes_again_before_all_others_have_come(pack):
    stream = batches(pack=pack)
    counts = collections.Counter({example: 0 for example in range(len(SOURCE))})
    for _ in range(40):
        batch = next(stream)
        counts.update(example for example, *_ in segments_of(batch, stream.examples))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert stream.epoch == pytest.approx(counts.total() / len(SOURCE))
    assert stream.epoch > 3


def test_without_packing_the_order_is_a_new_permutation_each_epoch():
    stream = batches(batch_size=41, pack=False)
    epochs = [[example for example, *_ in segments_of(next(stream), stream.examples)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(41)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_packing_fills_rows_better_than_one_example_a_row():
    def fill(pack: bool) -> float:
        stream = batches(pack=pack, batch_size=8)
        return float(np.mean([next(stream).segment_ids > 0 for _ in range(20)]))

    assert fill(True) > 0.8 > 0.5 > fill(False)


def test_first_fit_takes_the_first_row_with_room():
    # Lengths 5, 4, 3 and 2 in rows of 7, whatever the order: no row could take the first example of a later row.
    source = ListSource([("1" * length, "") for length in (5, 4, 3, 2)])
    stream = make_batches(source, TOKENIZER, batch_size=3, max_length=7, seed=0)
    batch = next(stream)
    lengths = [[int((row == s).sum()) for s in range(1, row.max() + 1)] for row in batch.segment_ids]
    for later in (1, 2):
        for earlier in range(later):
            assert 7 - sum(lengths[earlier]) < max(lengths[later])


@pytest.mark.parametrize("steps", [0, 1, 5, 23])
@pytest.mark.parametrize("pack", [True, False])
def test_resuming_goes_on_with_the_same_batches_within_and_across_epochs(steps, pack):
    straight = batches(pack=pack)
    for _ in range(steps):
        next(straight)
    state = json.loads(json.dumps(straight.get_state()))
    resumed = batches(pack=pack)
    resumed.set_state(state)
    for _ in range(12):
        expected, actual = next(straight), next(resumed)
        for field in TEXT_FIELDS:
            np.testing.assert_array_equal(getattr(actual, field.name), getattr(expected, field.name))
        np.testing.assert_array_equal(resumed.examples, straight.examples)
    assert resumed.get_state() == straight.get_state()


OTHER_TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str()), pad_token=None)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 4},
        {"batch_size": 2},
        {"max_length": 25},
        {"pack": False},
        {"source": ListSource([("1" * (1 + 7 * i % 10) + "\n", str(i * 37 - 399)) for i in range(41)])},
        {"tokenizer": OTHER_TOKENIZER},
    ],
)
def test_the_state_of_another_stream_is_refused(change):
    arguments = {"source": SOURCE, "tokenizer": TOKENIZER, "batch_size": 4, "max_length": 24, "seed": 3} | change
    other = make_batches(arguments.pop("source"), arguments.pop("tokenizer"), **arguments)
    state = batches().get_state()
    with pytest.raises(DataError, match="another data stream"):
        other.set_state(state)
    other.set_state(state, allow_change=True)


def test_the_fingerprint_can_be_written_as_json_and_names_the_settings():
    stream = batches()
    fingerprint = json.loads(json.dumps(stream.fingerprint))
    assert fingerprint == stream.fingerprint == batches().fingerprint
    assert fingerprint["seed"] == 3 and fingerprint["batch_size"] == 4 and fingerprint["source"] == SOURCE.fingerprint


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_are_the_rows_of_the_whole_batch(count):
    whole, shards = batches(), [batches(shard=(index, count)) for index in range(count)]
    for _ in range(15):
        expected, parts = next(whole), [next(shard) for shard in shards]
        for field in TEXT_FIELDS:
            joined = np.concatenate([getattr(part, field.name) for part in parts])
            np.testing.assert_array_equal(joined, getattr(expected, field.name))
        np.testing.assert_array_equal(np.concatenate([shard.examples for shard in shards]), whole.examples)
    # So a run may go on with another number of processes.
    shards[0].set_state(whole.get_state())


@pytest.mark.parametrize(("batch_size", "shard"), [(4, (0, 3)), (4, (2, 2)), (4, (-1, 2)), (0, (0, 1))])
def test_an_impossible_shard_is_refused(batch_size, shard):
    with pytest.raises(ValueError, match="multiple of their number"):
        batches(batch_size=batch_size, shard=shard)


def test_fewer_examples_than_rows_wrap_into_the_next_epoch():
    stream = make_batches(ListSource([("1\n", "2"), ("3\n", "4")]), TOKENIZER, batch_size=8, max_length=3, seed=0)
    counts = collections.Counter(example for example, *_ in segments_of(next(stream), stream.examples))
    assert counts == {0: 4, 1: 4}


@pytest.mark.parametrize("vocab_size", [1, 200])
def test_a_head_too_narrow_for_the_tokens_is_found_before_the_device(vocab_size):
    with pytest.raises(TokenRangeError, match=f"V = {vocab_size}"):
        next(batches(vocab_size=vocab_size))


def test_prompts_are_padded_left_and_kept_whole():
    source = ListSource([("1" * length + "\n", str(length)) for length in (3, 40, 15, 16, 1, 2, 3)])
    found = make_prompt_batches(source, TOKENIZER, batch_size=2)
    assert [batch.input_ids.shape for batch in found] == [(2, 16), (2, 16), (2, 16), (2, 32), (2, 64)]
    assert [[e.key for e in batch.examples] for batch in found] == [
        ["key-0", "key-2"], ["key-4", "key-5"], ["key-6"], ["key-3"], ["key-1"],
    ]  # fmt: skip
    for batch in found:
        for row, example in enumerate(batch.examples):
            ids = TOKENIZER.encode(example.prompt)
            width = batch.input_ids.shape[1]
            assert batch.input_ids[row].tolist() == [TOKENIZER.pad_id] * (width - len(ids)) + ids
            assert batch.attention_mask[row].tolist() == [False] * (width - len(ids)) + [True] * len(ids)
        # Spare rows hold a real prompt: a row without any token to attend to would be a softmax over nothing.
        assert batch.attention_mask[:, -1].all()


def test_prompts_take_the_first_examples():
    found = make_prompt_batches(SOURCE, TOKENIZER, batch_size=4, examples=10)
    assert sorted(int(e.key.split("-")[1]) for batch in found for e in batch.examples) == list(range(10))


def test_prompts_are_never_dropped():
    with pytest.raises(DataError, match="key-0 has a prompt of 21 tokens; 1 to 20"):
        make_prompt_batches(ListSource([("1" * 20 + "\n", "2")]), TOKENIZER, batch_size=1, max_length=20)
    with pytest.raises(DataError, match="0 tokens"):
        make_prompt_batches(ListSource([("", "2")]), TOKENIZER, batch_size=1)
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "examples": 0}, {"batch_size": 1, "examples": 42}):
        with pytest.raises(ValueError, match="must be positive"):
            make_prompt_batches(SOURCE, TOKENIZER, **wrong)


def test_an_image_is_refused_wherever_text_alone_is_read():
    source = ListSource([("2 + 2\n", "4"), ("what time?\n", "3:10")])
    source._examples[1] = dataclasses.replace(source._examples[1], image=b"a picture")
    words = "Example key-1 has an image, and the backbone reads text alone: choose a backbone with vision"
    for read in (
        lambda: encode(source[1], TOKENIZER),
        lambda: encode_source(source, TOKENIZER, max_length=64),
        lambda: batches(source),
        lambda: make_prompt_batches(source, TOKENIZER, batch_size=2),
    ):
        with pytest.raises(DataError, match=words):
            read()
    assert len(make_prompt_batches(source, TOKENIZER, batch_size=2, examples=1)) == 1
