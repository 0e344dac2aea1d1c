"""Folders as people have them: their own tokenizers, several ends of text, the hub's cache, leftovers, weights out of range."""

import functools
import json
import os
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_attn.data import ByteTokenizer
from parallel_attn.runs import open_run
from parallel_attn.runs.convert import main as convert
from parallel_attn.runs.export import QWEN2_WORDS
from parallel_attn.runs.export import main as export
from tests.data.tokenizer_files import LINES, byte_level
from tests.interop.models import their_config, their_model
from tests.runs.made import made_run
from tests.runs.test_hugging_face import AWKWARD, LLAMA, ok, refused, saved

MLA = ("attention=mla", "attention.head_dim=null")
TYPES = {
    "llama": (),
    "qwen2": ("attention.bias=qkv",),
    "qwen3": ("attention.qk_norm=head",),
    "qwen3_next": ("attention=gated_gqa", "attention.qk_norm=head"),
    "qwen3_5_text": ("attention=qwen3_5",),
    "deepseek_v2": (*MLA, "attention.rope.style=interleaved"),
    "deepseek_v3": MLA,
}

QUICK = ("qwen2", "qwen3", "deepseek_v3")


@functools.cache
def qwen2_like() -> str:
    """Qwen2's scheme: NFC, its way to cut words, the end of a turn before the end of a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"), level])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(LINES, trainer)
    library.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    return library.to_str()


def with_tokenizer(folder, model_type: str, text: str, **files):
    """A folder of a small model with 420 tokens, this tokenizer, and these other files."""
    settings = {**LLAMA, "vocab_size": 420}
    their_model(their_config(model_type, **settings), torch.float32).save_pretrained(folder)
    for name, content in {"tokenizer": json.loads(text), **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TYPES]
)
def test_auto_tokenizer_gives_our_tokens_whatever_the_model_type(model_type, tmp_path, capsys):
    """Or the command says that it does not: transformers 5 has a tokenizer of its own for every folder of qwen2."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    overrides = ("model.num_heads=4", *TYPES[model_type])
    run_dir = made_run(tmp_path / "run", *overrides)
    ok(export, f"run={run_dir}", f"out={tmp_path}/hf", f"model_type={model_type}", f"--json={tmp_path}/told.json")
    wanted = ByteTokenizer().encode(AWKWARD.encode()).tolist()
    found = AutoTokenizer.from_pretrained(tmp_path / "hf")(AWKWARD)["input_ids"]
    assert (
        (found == wanted)
        == json.loads((tmp_path / "told.json").read_text())["auto_tokenizer"]
        == (model_type != "qwen2")
    )
    output = capsys.readouterr().out
    assert ("warning: for a qwen2 folder" in output) == (model_type == "qwen2")
    assert ("= PreTrainedTokenizerFast.from" in output) == (model_type == "qwen2")
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")(AWKWARD)["input_ids"] == wanted


def test_qwen2_with_its_own_tokenizer_goes_through(tmp_path, capsys):
    from transformers import AutoTokenizer

    with_tokenizer(tmp_path / "hf", "qwen2", qwen2_like(), generation_config={"eos_token_id": [300, 301]})
    ok(convert, f"hf_model={tmp_path}/hf", f"out={tmp_path}/run")
    ours = open_run(tmp_path / "run").tokenizer
    assert ours.end_of_text == 301  # what ends a text, though what ends a turn is named first
    ok(export, f"run={tmp_path}/run", f"out={tmp_path}/back")
    assert "warning" not in capsys.readouterr().out
    theirs = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in (AWKWARD, " Ａ² é e\u0301 12345\n\n"):
        assert theirs(text)["input_ids"] == ours.encode(text.encode()).tolist()
    assert theirs.eos_token == "<|endoftext|>"


def test_which_token_ends_a_text(tmp_path, capsys):
    """What is given; else what the files beside the tokenizer say; the model's ids only for the model's own tokenizer."""
    with_tokenizer(tmp_path / "hf", "llama", byte_level(end="<done>"), generation_config={"eos_token_id": 7})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(byte_level())
    found = {}
    for name, given in {
        "ids": (),
        "name": ("tokenizer.end_of_text=<done>",),
        "beside": (f"tokenizer={tmp_path}/other",),
    }.items():
        ok(convert, f"hf_model={tmp_path}/hf", f"out={tmp_path}/{name}", *given)
        found[name] = open_run(tmp_path / name).tokenizer.end_of_text
    assert found == {"ids": 7, "name": 0, "beside": 0}
    (tmp_path / "hf" / "generation_config.json").unlink()
    to = (f"hf_model={tmp_path}/hf", f"out={tmp_path}/none")
    refused(capsys, convert, "set tokenizer.end_of_text to a token, such as one of <done>", *to)
    refused(capsys, convert, "tokenizer.end_of_text=<x>: not in the vocabulary", *to, "tokenizer.end_of_text=<x>")
    refused(capsys, convert, "tokenizer=bytes has its own", *to, "tokenizer=bytes", "tokenizer.end_of_text=<done>")
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": {"content": "<done>"}}')
    ok(convert, *to)
    assert open_run(tmp_path / "none").tokenizer.end_of_text == 0


def test_a_place_in_the_cache_of_the_hub(tmp_path, capsys):
    """There the files are links; the place above them is not the folder to name."""
    place = tmp_path / "models--a--b"
    saved(place / "blobs", "llama")
    (place / "snapshots" / "abc").mkdir(parents=True)
    for path in (place / "blobs").iterdir():
        (place / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/{path.name}")
    to = (f"out={tmp_path}/run", "tokenizer=bytes")
    refused(capsys, convert, f"cache: name {place}/snapshots/abc", f"hf_model={place}", *to)
    refused(capsys, convert, "or that `hf download MODEL", "hf_model=meta-llama/Llama-3.2-1B", *to)
    ok(convert, f"hf_model={place}/snapshots/abc", *to)


def test_an_index_left_over_from_another_save_is_not_heard(tmp_path):
    """transformers takes model.safetensors where it is there."""
    saved(tmp_path / "hf", "llama")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    ok(convert, f"hf_model={tmp_path}/hf", f"out={tmp_path}/run", "tokenizer=bytes")


def test_weights_out_of_range(tmp_path, capsys):
    saved(tmp_path / "hf", "llama")
    weights = tmp_path / "hf" / "model.safetensors"
    tensors, name = load_file(weights), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 3] = 1e6
    save_file(tensors, weights)
    ok(convert, f"hf_model={tmp_path}/hf", f"out={tmp_path}/run", "tokenizer=bytes")
    to = (f"run={tmp_path}/run", f"out={tmp_path}/half")
    refused(capsys, export, f"dtype=float16: {name} holds 1e+06, float16 ends at", *to, "dtype=float16")
    assert not (tmp_path / "half").exists() and not list(tmp_path.glob(".half*"))
    ok(export, *to, "dtype=bfloat16")
    tensors[name][3, 3] = float("nan")
    save_file(tensors, weights)
    to = (f"hf_model={tmp_path}/hf", f"out={tmp_path}/nan", "tokenizer=bytes")
    refused(capsys, convert, f"tensor {name} of {weights} holds values that are not finite", *to)


def test_a_disk_that_refuses_an_export(tmp_path, capsys):
    run_dir = made_run(tmp_path / "run", "model.num_heads=4")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert export([f"run={run_dir}", f"out={tmp_path}/hf"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert f"{tmp_path}/hf cannot be written" in error and error.count("\n") == 1, error
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing(number, code, tmp_path, capsys, monkeypatch):
    from parallel_attn.interop import files

    run_dir = made_run(tmp_path / "run", "model.num_heads=4")
    monkeypatch.setattr(files, "narrowed", lambda *given: os.kill(os.getpid(), number))
    assert export([f"run={run_dir}", f"out={tmp_path}/hf"]) == code
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))


def test_lengths_and_keys(tmp_path, capsys):
    saved(tmp_path / "hf", "llama")
    to = (f"hf_model={tmp_path}/hf", "tokenizer=bytes")
    refused(
        capsys,
        convert,
        "tokeniser=bytes is not a key of convert hf_model=..., which has",
        f"out={tmp_path}/x",
        *to,
        "tokeniser=bytes",
    )
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for value, length in ((None, 128), (77, 77)):  # 128: the default train.seq_len
        path.write_text(json.dumps(config | {"max_position_embeddings": value}))
        ok(convert, *to, f"out={tmp_path}/{value}")
        assert open_run(tmp_path / str(value)).length == length
    path.write_text(json.dumps(config | {"max_position_embeddings": "long"}))
    refused(capsys, convert, "max_position_embeddings=long must be a whole number", *to, f"out={tmp_path}/x")
