"""Folders of transformers in and out: weights, configurations, generation configurations, tokenizers; bad folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_attn.data import ByteTokenizer, FileTokenizer
from parallel_attn.runs import open_run
from parallel_attn.runs.convert import main as convert
from parallel_attn.runs.export import main as export
from tests.interop.models import DEEPSEEK, LLAMA3, QWEN3_NEXT, SIZES, YARN, their_config, their_model
from tests.parity import world_axis
from tests.runs.made import made_run
from tests.training.resuming import trained
from tests.world import run

SIZES = {**SIZES, "vocab_size": 257}
LLAMA = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2}
V = {"vocab_size": 257}
CASES = {
    "llama": ("llama", {**LLAMA, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**LLAMA, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 12}),
    "qwen3-next": ("qwen3_next", {**QWEN3_NEXT, **V}),
    "qwen3.5": ("qwen3_5_text", {**QWEN3_NEXT, **V, "tie_word_embeddings": True}),
    "deepseek-v2": ("deepseek_v2", {**DEEPSEEK, **V, "q_lora_rank": 14, "rope_parameters": YARN}),
    "deepseek-v3": ("deepseek_v3", {**DEEPSEEK, **V, "q_lora_rank": None}),
}
TOKENS = torch.randint(0, 257, (2, 80), generator=torch.Generator().manual_seed(5))
AWKWARD = "  two\tspaces\r\n\nline é e\u0301 日本語 😀👩\u200d💻 don't <|endoftext|x> \x00 ﬁ"


def saved(folder, case, **how):
    model_type, settings = CASES[case]
    model = their_model(their_config(model_type, **settings), torch.float32)
    model.save_pretrained(folder, **how)
    return model


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def our_logits(run_dir, tokens=TOKENS):
    return logits_of(open_run(run_dir).model(world_axis()), tokens)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


def ok(command, *arguments):
    assert command([str(argument) for argument in arguments]) == 0


def refused(capsys, command, message, *arguments):
    capsys.readouterr()
    assert command([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case, tmp_path):
    """transformers -> several files -> here at degrees 1 and 2 -> transformers: the same logits, the same tensors."""
    from transformers import AutoModelForCausalLM

    theirs = saved(tmp_path / "theirs", case, max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    wanted = logits_of(theirs)
    ok(convert, f"hf_model={tmp_path}/theirs", f"out={tmp_path}/ours", "tokenizer=bytes")
    for degree in (1, 2, 4) if case in ("llama", "deepseek-v3") else (1, 2):  # 2 KV heads, 257 tokens on 4 ranks
        for found in run(degree, our_logits, str(tmp_path / "ours")):
            close(found, wanted)
    ok(export, f"run={tmp_path}/ours", f"out={tmp_path}/back", "max_file_bytes=70000", f"model_type={CASES[case][0]}")
    back, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(loading.values()), loading
    close(logits_of(back.eval()), wanted)
    assert back.config.vocab_size == 257 and back.get_input_embeddings().weight.shape[0] == 257
    assert back.config.eos_token_id == back.generation_config.eos_token_id == 256
    before, after = theirs.state_dict(), back.state_dict()
    assert set(before) == set(after)
    for name, tensor in before.items():  # bitwise where no gain was shifted
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=2e-7, msg=name)


def test_keys_of_old_and_new_configurations(tmp_path):
    """rope_theta at the top only, as before transformers 5; rope_parameters only, as since."""
    wanted = logits_of(saved(tmp_path / "new", "qwen2"))
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    assert theta == 500000.0 and "rope_theta" not in config
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    for name in ("new", "old"):
        ok(convert, f"hf_model={tmp_path}/{name}", f"out={tmp_path}/{name}-run", "tokenizer=bytes")
        close(our_logits_alone(tmp_path / f"{name}-run"), wanted)


def our_logits_alone(run_dir, tokens=TOKENS):
    return logits_of(open_run(run_dir).model(), tokens)


def in_files(folder, placed):
    """Rewrites a folder's weights into the files that `placed` gives for each name."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"part-{placed(name)}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_queries_keys_and_values_in_different_files(tmp_path):
    wanted = logits_of(saved(tmp_path / "theirs", "llama"))
    in_files(tmp_path / "theirs", lambda name: "q" if "q_proj" in name else "k" if "k_proj" in name else "rest")
    ok(convert, f"hf_model={tmp_path}/theirs", f"out={tmp_path}/ours", "tokenizer=bytes")
    for found in run(4, our_logits, str(tmp_path / "ours")):
        close(found, wanted)


def test_tied_under_either_name_or_both(tmp_path, capsys):
    wanted = logits_of(saved(tmp_path / "a", "llama"))
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    different = table.clone()
    different[3, 3] += 1
    for number, names in enumerate(({"lm_head.weight": table}, {"lm_head.weight": table, "model.embed_tokens.weight": table.clone()})):
        save_file(tensors | names, tmp_path / "a" / "model.safetensors")
        ok(convert, f"hf_model={tmp_path}/a", f"out={tmp_path}/{number}", "tokenizer=bytes")
        close(our_logits_alone(tmp_path / str(number)), wanted)
    save_file(tensors | {"lm_head.weight": different, "model.embed_tokens.weight": table}, tmp_path / "a" / "model.safetensors")
    refused(capsys, convert, "differ", f"hf_model={tmp_path}/a", f"out={tmp_path}/z", "tokenizer=bytes")
    assert not (tmp_path / "z").exists() and not list(tmp_path.glob(".z*"))


def test_halves_are_read_into_float32(tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = saved(tmp_path / "a", "qwen3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "b")
    ok(convert, f"hf_model={tmp_path}/b", f"out={tmp_path}/run", "tokenizer=bytes")
    opened = open_run(tmp_path / "run")
    assert {entry.dtype for entry in opened.checkpoint.index.tensors.values()} == {"F32"}
    # (a cast of the whole model would round its rotary tables too)
    close(logits_of(opened.model()), logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)))
    ok(export, f"run={tmp_path}/run", f"out={tmp_path}/c", "dtype=bfloat16")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert back.dtype == torch.bfloat16
    for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_a_trained_and_resumed_run_goes_out_and_on(tmp_path):
    """Trained at degree 2, gone on with, exported, imported, trained again; the first loss there is transformers' own."""
    from transformers import AutoModelForCausalLM

    from parallel_attn.data import EvalBatches, StdlibCorpus, prepare_tokens
    from tests.training.composed import records

    mla = ("attention=mla", "attention.head_dim=null", "parallel.tensor=2")
    trained(2, tmp_path / "a", *mla, "train.steps=3")
    trained(2, tmp_path / "a", *mla, "train.steps=5")
    ok(export, f"run={tmp_path}/a", f"out={tmp_path}/hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = TOKENS[:, :32]
    close(our_logits_alone(tmp_path / "a", tokens), logits_of(theirs, tokens))
    generated = theirs.generate(tokens[:1, :9], max_new_tokens=12, do_sample=False)[0, 9:].tolist()
    from parallel_attn.models import generate

    opened = open_run(tmp_path / "a")
    ours = generate(opened.model(), [tokens[0, :9].tolist()], seq_len=32, max_new_tokens=12, end_of_text=256)
    assert ours.continuations[0].tokens == [token for token in generated if token != 256]
    ok(convert, f"hf_model={tmp_path}/hf", f"out={tmp_path}/imported")
    assert open_run(tmp_path / "imported").tokenizer.end_of_text == 256
    again = ("parallel.tensor=2", f"checkpoint.resume={tmp_path}/imported", "train.steps=2", "optimizer.lr=1e-30", "eval.every=2")
    trained(2, tmp_path / "b", *again)
    data = open_run(tmp_path / "b").config
    split = prepare_tokens(StdlibCorpus(data.data.config), ByteTokenizer(), seq_len=32, builder=True).val
    nats = count = 0
    batches = EvalBatches(split, samples=data.eval.samples, seq_len=32, micro_batch_size=16, data_rank=0, data_degree=1, documents=False)
    for batch in batches:
        with torch.no_grad():
            scores = theirs(batch.tokens).logits.flatten(0, 1)
        valid = batch.targets.flatten() >= 0
        nats += torch.nn.functional.cross_entropy(scores[valid], batch.targets.flatten()[valid], reduction="sum").double()
        count += valid.sum()
    found = [record["val/loss"] for record in records(tmp_path / "b") if "val/loss" in record]
    assert found[-1] == pytest.approx((nats / count).item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "llama_like"])
def test_tokenizers_go_along(kind, tmp_path):
    """AutoTokenizer gives the ids that training saw, with no token added, and the folder's tokenizer comes back in."""
    from transformers import AutoTokenizer

    from tests.data import tokenizer_files

    tokenizer, overrides = ByteTokenizer(), ("model.num_heads=4",)
    if kind != "bytes":
        text = getattr(tokenizer_files, kind)()
        tokenizer = FileTokenizer(text, label="x")
        (tmp_path / "tokenizer.json").write_text(text)
        overrides += ("tokenizer=file", f"tokenizer.path={tmp_path}")
    run_dir = made_run(tmp_path / "run", *overrides, tokenizer=tokenizer, vocab_size=max(300, tokenizer.vocab_size))
    ok(export, f"run={run_dir}", f"out={tmp_path}/hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (AWKWARD, "def main():\n    return 1\n", " a"):
        assert theirs(text)["input_ids"] == tokenizer.encode(text.encode()).tolist()
    assert theirs.eos_token_id == tokenizer.end_of_text and theirs.model_max_length == 32
    ok(convert, f"hf_model={tmp_path}/hf", f"out={tmp_path}/again")
    again = open_run(tmp_path / "again").tokenizer
    assert again.end_of_text == tokenizer.end_of_text
    assert again.encode(AWKWARD.encode()).tolist() == tokenizer.encode(AWKWARD.encode()).tolist()


def test_folders_that_are_no_model(tmp_path, capsys):
    folder, out = tmp_path / "hf", f"out={tmp_path}/out"

    def no(message, *arguments):
        refused(capsys, convert, message, f"hf_model={folder}", out, *arguments)
        assert not (tmp_path / "out").exists()

    no("is not a folder")
    folder.mkdir()
    no("config.json is missing")
    (folder / "config.json").write_text("{}")
    no("has no model_type")
    (folder / "config.json").write_text("[")
    no("is no JSON")
    saved(folder, "llama")
    no("tokenizer.json cannot be read")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, weights)
    no(f"tensor {name} is missing", "tokenizer=bytes")
    save_file(tensors | {"model.layers.0.self_attn.extra": torch.zeros(1)}, weights)
    no("tensor model.layers.0.self_attn.extra has no place", "tokenizer=bytes")
    save_file(tensors | {name: torch.zeros(3, 3)}, weights)
    no(f"tensor {name} has the shape (3, 3)", "tokenizer=bytes")
    save_file(tensors | {name: tensors[name].to(torch.int8)}, weights)
    no(f"tensor {name} is stored as I8", "tokenizer=bytes")
    weights.write_bytes(weights.read_bytes()[:-100])
    no("is no whole safetensors file", "tokenizer=bytes")
    save_file(tensors, weights)
    in_files(folder, lambda key: "k" if "k_proj" in key else "rest")
    (folder / "part-k.safetensors").unlink()
    no("part-k.safetensors is missing", "tokenizer=bytes")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "part-rest.safetensors"
    index["weight_map"]["model.layers.0.self_attn.k_proj.weight"] = "part-rest.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    no("part-rest.safetensors has no tensor model.layers.0.self_attn.k_proj.weight", "tokenizer=bytes")
    index["weight_map"][name] = "../x.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    no("only files beside it are read", "tokenizer=bytes")
    (folder / "model.safetensors.index.json").unlink()
    no("has neither", "tokenizer=bytes")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    no("pickled weights are not read", "tokenizer=bytes")


def test_what_cannot_be_written_or_asked(tmp_path, capsys):
    windowed = made_run(tmp_path / "run", "attention=gla", "attention.head_dim=null")
    refused(capsys, export, "has no model type in transformers", f"run={windowed}", f"out={tmp_path}/o")
    sinks = made_run(tmp_path / "sinks", "attention.sinks=true")
    refused(capsys, export, "attention.sinks=true cannot be expressed", f"run={sinks}", f"out={tmp_path}/o")
    plain = made_run(tmp_path / "plain")
    refused(capsys, export, "model_type=gpt2 cannot express", f"run={plain}", f"out={tmp_path}/o", "model_type=gpt2")
    refused(capsys, export, "is there already", f"run={plain}", f"out={windowed}")
    refused(capsys, export, "out is missing", f"run={plain}")
    refused(capsys, export, "dtype=int8", f"run={plain}", f"out={tmp_path}/o", "dtype=int8")
    refused(capsys, convert, "give one of them", f"out={tmp_path}/o")
    refused(capsys, convert, "give one of them", f"run={plain}", f"hf_model={plain}", f"out={tmp_path}/o")
    refused(capsys, convert, "belongs to run=", f"hf_model={plain}", f"out={tmp_path}/o", "moments=fresh")
    refused(capsys, convert, "come from its config.json", f"hf_model={plain}", f"out={tmp_path}/o", "model.num_layers=2")
    seq2seq = made_run(tmp_path / "seq2seq", "model=encoder_decoder", "model.cross_attention.head_dim=8")
    refused(capsys, export, "EncoderDecoderLM has no model type", f"run={seq2seq}", f"out={tmp_path}/o")
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob(".*"))
