"""Datasets through the `datasets` library: local files by the same code that streams from the hub, and no network."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from parallel_attn.data import ByteTokenizer, HubCorpus, prepare_tokens
from parallel_attn.data.corpus import SPLIT_BY_DOCUMENT, SPLIT_GIVEN
from parallel_attn.errors import SettingsError
from tests.data.helpers import documents, text_of

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


@pytest.fixture
def dataset(tmp_path):
    """A dataset as on the hub: Parquet by split; 60 training documents (one null, one empty), 4 for validation."""
    folder = tmp_path / "my_dataset"
    (folder / "data").mkdir(parents=True)
    texts = [f"document {i} é" for i in range(60)]
    texts[7], texts[9] = None, ""
    for split, rows in (("train", texts), ("validation", [f"validation {i}" for i in range(4)])):
        table = pyarrow.table({"text": rows, "meta": [{"title": f"title {i}"} for i in range(len(rows))]})
        pyarrow.parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def hub(name, cache, **more) -> HubCorpus:
    return HubCorpus(HubCorpus.Config(name=str(name), cache_dir=str(cache), **more))


def prepared(corpus, **more):
    return prepare_tokens(corpus, ByteTokenizer(), builder=True, seq_len=4, **more)


def test_a_part_of_the_documents_is_held_out(dataset, tmp_path):
    corpus = hub(dataset, tmp_path / "cache")
    found = documents(corpus)
    kept = [f"document {i} é".encode() for i in range(60) if i not in (7, 9)]
    assert [text for _, text in found] == kept and corpus.nulls == 1
    assert [text for split, text in found if split == "val"] == kept[19::20]
    assert corpus.split_rule == SPLIT_BY_DOCUMENT


def test_a_validation_split(dataset, tmp_path):
    corpus = hub(dataset, tmp_path / "cache", val_split="validation")
    found = documents(corpus)
    assert [text for split, text in found if split == "val"] == [f"validation {i}".encode() for i in range(4)]
    assert len(found) == 58 + 4 and corpus.split_rule == SPLIT_GIVEN
    assert text_of(prepared(corpus)) == b"".join(text for _, text in found)


def test_max_documents_and_a_nested_field(dataset, tmp_path):
    corpus = hub(dataset, tmp_path / "cache", val_split="validation", max_documents=3, field="meta.title")
    expected = [("train", f"title {i}".encode()) for i in range(3)] + [("val", f"title {i}".encode()) for i in range(3)]
    assert documents(corpus) == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows-*.jsonl"])
def test_local_files(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(30))
    for file in ["rows-1.jsonl", "rows-2.jsonl"] if "*" in name else [name]:
        Path(file).write_text(text)
    found = [text for _, text in documents(hub(name, tmp_path / "cache"))]
    assert found == [f"row {i}".encode() for i in range(30)] * (2 if "*" in name else 1)


def test_cached_until_a_file_changes(dataset, tmp_path, monkeypatch):
    first = prepared(hub(dataset, tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(HubCorpus, "documents", None)
        assert prepared(hub(dataset, tmp_path / "cache")) == first
    other = prepared(hub(dataset, tmp_path / "cache", max_documents=40))
    assert other.train.path != first.train.path
    file = dataset / "data" / "train-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"new {i}" for i in range(60)]}), file)
    assert text_of(prepared(hub(dataset, tmp_path / "cache"))).startswith(b"new 0new 1")


class FakeApi:
    """The hub's answer, and how often it was asked."""

    asked: list = []

    def dataset_info(self, name, revision=None, timeout=None):
        self.asked.append((name, revision))

        class Info:
            sha = f"commit {len(self.asked)}"

        return Info


def test_a_name_of_the_hub_is_pinned_to_a_commit(tmp_path, monkeypatch):
    """The commit is asked for once; tokens, and those of another tokenizer later, come from exactly that one."""
    import datasets

    calls = []

    def load_dataset(**arguments):
        calls.append(arguments)
        return datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(40)]}).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    FakeApi.asked.clear()
    first = prepared(hub("owner/name", tmp_path / "cache", subset="part", revision="v1"))
    assert prepared(hub("owner/name", tmp_path / "cache", subset="part", revision="v1")) == first
    other = ByteTokenizer()
    other.fingerprint = "another"
    prepare_tokens(hub("owner/name", tmp_path / "cache", subset="part", revision="v1"), other, builder=True, seq_len=4)
    assert FakeApi.asked == [("owner/name", "v1")]
    wanted = {"path": "owner/name", "revision": "commit 1", "name": "part", "split": "train", "streaming": True}
    assert calls == [wanted, wanted]  # and never trust_remote_code


REFUSED = [
    ({"split": "nope"}, "data.split=nope: Bad split: nope. Available splits: ['train', 'validation']; give one"),
    ({"val_split": "nope"}, "data.val_split=nope: Bad split"),
    ({"subset": "nope"}, "data.subset=nope: BuilderConfig 'nope' not found. Available: ['default']"),
    ({"field": "body"}, "data.field=body: not in "),
    ({"field": "body"}, "my_dataset train; fields there: text, meta"),
    ({"field": "meta"}, "data.field=meta: dict instead of text in record 1 of "),
    ({"field": "meta.author"}, "data.field=meta.author: not in record 1 of "),
    ({"val_split": "train"}, "data.val_split=train: is also data.split"),
    ({"max_documents": 0}, "data.max_documents=0: must be at least 1; null"),
    ({"num_workers": -1}, "data.num_workers=-1: must not be negative"),
    ({"split": " "}, "data.split=' ': empty"),
]


@pytest.mark.parametrize("keys,says", REFUSED, ids=lambda value: str(value)[:40])
def test_refused(dataset, tmp_path, keys, says):
    with pytest.raises(SettingsError) as error:
        prepared(hub(dataset, tmp_path / "cache", **keys))
    message = str(error.value)
    assert says in message and ";" in message and "\n" not in message


def test_files_that_cannot_be_read(dataset, tmp_path):
    (dataset / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 broken PAR1")
    with pytest.raises(SettingsError, match=r"^data\.name=.*my_dataset.*cannot be read \(.*; give data that"):
        prepared(hub(dataset, tmp_path / "cache"))
    with pytest.raises(SettingsError, match=r"^data\.name= : no dataset; give"):
        prepared(hub(" ", tmp_path / "cache"))


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(SettingsError, match=r"^data\.name=.*/nothing: neither here nor on the hub .*; give a dataset"):
        prepared(hub(tmp_path / "nothing", tmp_path / "cache"))


def test_offline_says_so(tmp_path):
    """The tests run with HF_HUB_OFFLINE=1, as a machine without network would end up."""
    with pytest.raises(SettingsError, match=r"^data\.name=no/where: the hub cannot be reached \(.*offline.*data=text"):
        prepared(hub("no/where", tmp_path / "cache"))


def test_without_network_says_so(tmp_path):
    """In a process of its own that may try: no name resolves, since the endpoint has none."""
    code = (
        "from tests.data.test_hub import hub, prepared\n"
        "try:\n"
        f"    prepared(hub('no/where', {str(tmp_path)!r}))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environment = {"HF_ENDPOINT": "http://hub.invalid", "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.startswith("SettingsError data.name=no/where: the hub cannot be reached ("), run


@pytest.mark.parametrize("preset", ["hub", "tinystories", "wikitext103", "fineweb_edu", "openwebtext"])
def test_presets_fit_the_config(preset):
    keys = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text())
    assert keys.pop("_target_") == "parallel_attn.data.HubCorpus"
    config = HubCorpus.Config(**keys)
    assert set(keys) == set(HubCorpus.Config.__dataclass_fields__)  # each key is shown
    assert config.name.count("/") == 1 if preset != "hub" else config.name == "???"
