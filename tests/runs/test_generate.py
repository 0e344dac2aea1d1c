"""`parallel-attn generate` on one process, by its function; the command line under torchrun once."""

import io
import json
import os
import signal
import sys

import pytest

from parallel_attn.data import ByteTokenizer, FileTokenizer
from parallel_attn import AxisGroup
from parallel_attn.runs import open_run
from parallel_attn.runs.generate import main
from parallel_attn.runs.stream import TextStream, text_after
from tests.command import ROOT, execute
from tests.data.tokenizer_files import ENDS, kinds
from tests.runs.made import made_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("generate") / "a run=1", "attention=mla", "attention.head_dim=null")


def outcome(capsys, *arguments) -> tuple[int, str, str]:
    code = 0
    try:
        main(list(arguments))
    except SystemExit as end:
        code = end.code
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_prompt_of_any_characters_goes_on(run_dir, capsys, tmp_path):
    prompt = 'a="b", {c}=[1,2]\n日本 é'
    code, out, err = outcome(
        capsys, f"run={run_dir}", f"prompt={prompt}", "max_new_tokens=5", "--json", str(tmp_path / "o.json")
    )
    assert code == 0 and out.startswith(prompt) and "5 tokens in" in err and "stopped at: max_new_tokens" in err
    found = json.loads((tmp_path / "o.json").read_text())
    row = found["results"][0]
    assert row["prompt"] == prompt and len(row["tokens"]) == 5 and out == prompt + row["text"] + "\n"
    model = open_run(run_dir).build(AxisGroup())
    assert found["cache_bytes_per_token"] == 4 * model.cache_elements_per_token()
    assert found["cache_bytes"] == found["cache_bytes_per_token"] * (len(prompt.encode()) + 4)


def test_standard_input_and_bytes_that_are_no_text(run_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff two\nlines\n")))
    code, out, err = outcome(
        capsys, f"run={run_dir}", "prompt_file=-", "max_new_tokens=3", "--json", str(tmp_path / "o.json")
    )
    assert code == 0 and out.startswith("? two\nlines\n") and "3 tokens" in err
    assert json.loads((tmp_path / "o.json").read_text())["results"][0]["prompt"] == "\udcff two\nlines\n"


def test_ctrl_c_leaves_what_was_told(run_dir, capsys, monkeypatch):
    def feed(self, token, whole=TextStream.feed, count=[]):
        count.append(token)
        if len(count) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return "x"

    monkeypatch.setattr(TextStream, "feed", feed)
    assert outcome(capsys, f"run={run_dir}", "prompt=ab") == (130, "abxx\n", "interrupted: SIGINT\n")
    monkeypatch.undo()
    assert outcome(capsys, f"run={run_dir}", "prompt=ab", "max_new_tokens=1")[0] == 0


def test_several_prompts_and_past_the_end(run_dir, capsys):
    code, out, err = outcome(capsys, f"run={run_dir}", "prompt=abcdefgh", "prompt=x", "max_new_tokens=26")
    assert code == 0 and "--- prompt 1: length\nabcdefgh" in out and "--- prompt 2: max_new_tokens\nx" in out
    assert "note: the model was trained on sequences of 32 tokens" in err
    code, out, err = outcome(capsys, f"run={run_dir}", "prompt=abc", "max_new_tokens=0")
    assert (code, out) == (0, "abc\n") and "0 tokens" in err


def test_sampling_repeats_by_its_seed(run_dir, capsys):
    texts = [
        outcome(capsys, f"run={run_dir}", "prompt=ab", "temperature=1.5", "top_k=50", "top_p=0.9", f"seed={seed}")[1]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["prompt="], "prompt is empty"),
        ([], "prompt is missing"),
        (["prompt=b", "prompt=" + "a" * 33], "prompt='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa': it has 33 tokens, the model's longest sequence 32"),
        (["prompt=a", "temperature=-1"], "temperature=-1.0"),
        (["prompt=a", "temperature=warm"], "temperature=warm must be a number"),
        (["prompt=a", "top_k=258"], "top_k=258 is above the vocabulary of 257"),
        (["prompt=a", "top_p=0"], "top_p=0.0"),
        (["prompt=a", "max_new_tokens=-1"], "max_new_tokens=-1"),
        (["prompt=a", "max_new_tokens=1.5"], "max_new_tokens=1.5 must be a whole number"),
        (["prompt=a", "promt=b"], "promt=b is not a key of this command"),
        (["prompt=a", "seed=1", "seed=2"], "seed is given twice"),
        (["prompt=a", "parallel.tensor=3"], "parallel.tensor=3 does not divide the 1 started process"),
        (["prompt=a", "dtype=int8"], "dtype=int8 is not one of"),
        (["prompt=a", "--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json cannot be written"),
        (["prompt_file=/nowhere"], "prompt_file=/nowhere cannot be read"),
    ],
)
def test_bad_input_is_one_line(run_dir, capsys, arguments, message):
    code, out, err = outcome(capsys, f"run={run_dir}", *arguments)
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["prompt=a"], "parallel.tensor=8"),
        (["prompt=a", "parallel.tensor=3"], "use one of 1, 2, 4, 8"),
        (["prompt=a", "parallel.tensor=2", "parallel.data=2"], "use parallel.data=4"),
        (["prompt_file=-", "parallel.tensor=2"], "several processes cannot share it"),
    ],
)
def test_bad_layouts_stop_before_the_world_starts(run_dir, capsys, monkeypatch, arguments, message):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = outcome(capsys, f"run={run_dir}", *arguments)
    assert code == 2 and not out and err.count("\n") == 1 and message in err


def test_a_folder_that_is_no_run(capsys, tmp_path):
    code, _, err = outcome(capsys, f"run={tmp_path}", "prompt=a")
    assert code == 1 and err.count("\n") == 1 and "holds no whole, finite checkpoint" in err
    code, _, err = outcome(capsys, f"run={tmp_path}/x", "prompt=a")
    assert code == 2 and "is not a folder" in err


def test_characters_that_the_tokenizer_lacks(capsys, tmp_path):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    tokenizer = FileTokenizer(library.to_str(), label="tokenizer.path=x")
    overrides = ("tokenizer=file", f"tokenizer.path={tmp_path}/tokenizer.json")
    run_dir = made_run(tmp_path / "run", *overrides, tokenizer=tokenizer, vocab_size=6)
    code, _, err = outcome(capsys, f"run={run_dir}", "prompt=abé")
    assert code == 2 and err.count("\n") == 1 and "holds 'é' (U+00E9), which the tokenizer of the run lacks" in err
    code, out, err = outcome(capsys, f"run={run_dir}", "prompt=abba", "max_new_tokens=5", "temperature=9")
    assert code == 0 and out.startswith("abba")


def test_damaged_weights_are_not_read(capsys, tmp_path):
    folder = made_run(tmp_path / "run")
    (weights,) = folder.glob("checkpoints/step-*/*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-6] ^= 0x40
    weights.write_bytes(content)
    code, out, err = outcome(capsys, f"run={folder}", "prompt=a")
    assert code == 1 and not out and err.count("\n") == 1 and "is damaged: the checksum of master/" in err


def test_a_character_is_printed_when_it_is_whole():
    text = "aé日😀!"
    stream = TextStream(ByteTokenizer(), list(b"prompt"))
    parts = [stream.feed(byte) for byte in text.encode()] + [stream.end()]
    assert "".join(parts) == text and parts[0] == "a" and "\ufffd" not in "".join(parts)
    cut = TextStream(ByteTokenizer(), [])
    assert [cut.feed(byte) for byte in "é".encode()[:1]] == [""] and cut.end() == "\ufffd"


@pytest.mark.parametrize("kind", kinds())
def test_tokens_give_the_text_that_they_have_behind_their_prompt(kind):
    """Also where spaces depend on what stands before, and where three byte tokens are one character."""
    tokenizer = FileTokenizer(kinds()[kind], label="x", end_of_text=ENDS.get(kind))
    for prompt, rest in (
        ("the quick", " brown fox 日本語漢字漢字漢字漢字 x 😀😀😀 y"),
        ("漢字漢字漢字", "漢字漢 and  so"),
    ):
        before, ids = (tokenizer.encode(text.encode()).tolist() for text in (prompt, prompt + rest))
        assert ids[: len(before)] == before
        wanted = tokenizer.decode(ids).decode().removeprefix(tokenizer.decode(before).decode())
        assert text_after(tokenizer, before, ids[len(before) :]) == wanted
        stream = TextStream(tokenizer, before)
        assert sum(bool(stream.feed(token)) for token in ids[len(before) :]) > 1  # as it comes, not at the end


@pytest.mark.parametrize("kind, lacking", [("t5", "鬱"), ("bert", "鬱"), ("llama", None), ("byte level", None)])
def test_which_character_a_tokenizer_lacks(kind, lacking):
    tokenizer = FileTokenizer(kinds()[kind], label="x", end_of_text=ENDS.get(kind))
    assert tokenizer.lacks("The café 鬱") == lacking
    assert tokenizer.lacks("The quick  brown\tfox\n") is None


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
TORCHRUN += ["parallel_attn.cli", "generate"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_under_torchrun_two_replicas_of_two(run_dir, tmp_path, capsys):
    """The same tokens as one process, dealt out over replicas that stop at different lengths."""
    prompts = ["prompt=abcdefgh", "prompt=xy", "prompt=0123456789012345678901234567890"]
    arguments = [f"run={run_dir}", *prompts, "max_new_tokens=20", "temperature=1.2", "seed=4"]
    command = [*TORCHRUN, *arguments, "parallel.tensor=2", "--json", "many.json"]
    many = execute(command, cwd=tmp_path, timeout=120, env=ENVIRONMENT)
    assert many.returncode == 0, many.stderr
    code, out, _ = outcome(capsys, *arguments, "--json", str(tmp_path / "one.json"))
    assert code == 0 and many.stdout == out
    found, wanted = (json.loads((tmp_path / name).read_text()) for name in ("many.json", "one.json"))
    assert found["results"] == wanted["results"] and [row["reason"] for row in found["results"]][2] == "length"


@pytest.mark.slow
def test_bad_input_ends_all_ranks(run_dir, tmp_path):
    wrong = execute([*TORCHRUN, f"run={run_dir}", "prompt="], cwd=tmp_path, timeout=120, env=ENVIRONMENT)
    assert wrong.returncode != 0 and wrong.stderr.count("error: prompt is empty") == 1


@pytest.mark.slow
def test_a_reader_that_leaves_ends_no_rank(tmp_path):
    """`| head` under torchrun: the first rank finds nobody to tell, the other must not find it gone."""
    run_dir = made_run(tmp_path / "run", "train.seq_len=1024")
    command = [*TORCHRUN[:5], "2", *TORCHRUN[6:], f"run={run_dir}", "prompt=ab", "max_new_tokens=1000", "temperature=9"]
    piped = ["bash", "-c", '"$@" | head -c 3; exit ${PIPESTATUS[0]}', "-", *command]
    done = execute(piped, cwd=tmp_path, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0 and done.stdout.startswith("ab") and "Traceback" not in done.stderr, done.stderr
