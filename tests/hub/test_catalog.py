"""The meaning of names: entries of both catalogs, files on the hub, files on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeedge import paths
from moeedge.cli.engine_options import EngineOptions
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.errors import CatalogError, InputError, ModelNameError
from moeedge.hub import local
from moeedge.hub.catalog import (
    Catalog,
    HubFile,
    HubReference,
    Starter,
    Variant,
    all_parts,
    choose_files,
    load_catalog,
    parse_reference,
)
from moeedge.hub.local import cached_models, list_models, locate, plan_removal
from moeedge.hub.remote import want_pair

_SHAPE = "expert_layers = 2\nexperts = 8\nused = 2\nexpert_weights = 100\nweights = 10000\nkv_bytes_per_token = 64\n"

Write = Callable[[str], Path]
_SHA = "a" * 64
_PAIR = f"""
[[model]]
name = "mine"
aliases = ["my:model"]
drafts = ["mine-draft:Q8_0"]
draft_max = 2
[[model.variant]]
quant = "Q4_0"
repo = "me/mine-GGUF"
files = ["mine-Q4_0.gguf"]
size_bytes = [4]
sha256 = ["{_SHA}"]
[[model.variant]]
quant = "Q8_0"
repo = "me/mine-GGUF"
files = ["q8/mine-Q8_0-00001-of-00002.gguf", "q8/mine-Q8_0-00002-of-00002.gguf"]
verified = false
[[model]]
name = "mine-draft"
[[model.variant]]
quant = "Q4_0"
repo = "me/draft-GGUF"
files = ["draft-Q4_0.gguf"]
[[model.variant]]
quant = "Q8_0"
repo = "me/draft-GGUF"
files = ["draft-Q8_0.gguf"]
"""


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "MOEEDGE_CATALOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # nothing here asks


@pytest.fixture
def own(tmp_path: Path) -> Write:
    """Writes the user's own catalog where it is looked for."""

    def write(text: str) -> Path:
        path = tmp_path / "config" / "moeedge" / "catalog.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def store(repo: str, file: str, body: bytes = b"GGUF", *, blob: str = "b" * 64, commit: str = "c" * 40) -> Path:
    """A file in the cache, as huggingface_hub leaves it."""
    folder = local.repo_folder(repo)
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / blob).write_bytes(body)
    link = folder / "snapshots" / commit / file
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder / "blobs" / blob)
    return link


def test_the_shipped_catalog() -> None:
    catalog = load_catalog()
    requested = ["qwen3-30b-a3b", "deepseek-v2-lite", "olmoe-1b-7b", "mixtral-8x7b", "gpt-oss-20b", "phi-3.5-moe"]
    for name in [*requested, "glm-4.7-flash"]:
        assert name in catalog.entries
    target = catalog.find("qwen3-30b-a3b")
    assert target is not None and [draft.name for draft in catalog.drafts(target)] == [
        "qwen3-0.6b",
        "qwen3-1.7b",
        "qwen3-4b",
    ]
    itself = catalog.find("deepseek-v2-lite:IQ2_M")  # the draft of the others
    assert itself is not None and catalog.drafts(itself) == []
    for entry in catalog.entries.values():
        assert entry.about and entry.licence and entry.source, entry.name
        assert entry.drafts or entry.note or any(entry.name in other.drafts for other in catalog.entries.values())
        for variant in entry.variants:
            assert variant.source, entry.name
            assert variant.size_bytes or variant.about_bytes, entry.name
        if entry.shape is not None:  # as config files and model cards say; several matrices have more bits than experts
            assert entry.shape.source, entry.name
            assert entry.shape.experts == 0 or 0.85 < entry.shape.expert_share < 0.99, entry.name
            assert all(file.sha256 is None or file.size_bytes for file in variant.files)
    aliases = [alias for entry in catalog.entries.values() for alias in (entry.name, *entry.aliases)]
    assert len(aliases) == len(set(aliases))


def test_the_first_real_model_is_small_and_known_exactly() -> None:
    starter = load_catalog().starter()
    assert starter is not None and starter.size_bytes is not None
    assert starter.size_bytes < 10**9
    assert starter.command == f"moeedge pull {starter.name} && moeedge chat -m {starter.name}"
    choice = load_catalog().find(starter.name)
    assert choice is not None and choice.variant.size_bytes == starter.size_bytes  # not a rounded one


def test_ones_own_first_model_comes_before_ours(own: Write) -> None:
    own('[[model]]\nname = "tiny"\nstarter = true\n[[model.variant]]\nrepo = "a/b"\nfiles = ["x.gguf"]\n')
    assert load_catalog().starter() == Starter("tiny", None, "moeedge pull tiny && moeedge chat -m tiny")
    assert Catalog().starter() is None


def test_names_aliases_and_types(own: Write) -> None:
    own(_PAIR)
    catalog = load_catalog()
    for text, quant, name in [
        ("Mine", "Q4_0", "mine"),
        ("my:model", "Q4_0", "mine"),
        ("mine:q8_0", "Q8_0", "mine:Q8_0"),
    ]:
        choice = catalog.find(text)
        assert choice is not None and (choice.variant.quant, choice.name) == (quant, name)
    with pytest.raises(CatalogError, match="'Q5_K' of mine") as unknown:
        catalog.find("mine:Q5_K")
    assert "Q4_0, Q8_0" in unknown.value.hint
    assert catalog.find("qwen3-0.6b") is not None  # the shipped ones are there, too
    assert catalog.find("unknown") is None
    assert catalog.similar("qwen3-30b-a3")[0] == "qwen3-30b-a3b"
    assert catalog.similar("mne")[0] == "mine"
    assert catalog.similar("") == []


def test_an_own_entry_replaces_the_shipped_one(own: Write, tmp_path: Path) -> None:
    own('[[model]]\nname = "olmoe-1b-7b"\n[[model.variant]]\npath = "sub/x.gguf"\n')
    choice = load_catalog().find("olmoe-1b-7b")
    assert choice is not None
    assert choice.variant.local == tmp_path / "config" / "moeedge" / "sub" / "x.gguf"
    with pytest.raises(ModelNameError, match=r"sub/x\.gguf"):
        locate("olmoe-1b-7b")


_NAMED = '[[model]]\nname = "x"\n'
_FILE = f'{_NAMED}[[model.variant]]\npath = "x"\n'
_REPO = f'{_NAMED}[[model.variant]]\nrepo = "a/b"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[model]\n", "TOML"),
        ('[[models]]\nname = "x"\n', '"models"'),
        ("[[model]]\n", "has no name"),
        ('[[model]]\nname = "a b"\n', "model a b"),
        ('[[model]]\nname = "bundled"\n', "model bundled"),
        (_NAMED, r"model\.variant"),
        (f"{_NAMED}size = 3\n", '"size"'),
        (f"{_NAMED}draft_max = -1\n", "draft_max"),
        (f"{_NAMED}starter = 1\n", "starter"),
        (f"{_FILE}[model.shape]\n{_SHAPE}width = 3\n", '"width"'),
        (f"{_FILE}[model.shape]\nexperts = 8\n", "lacks .*weights"),
        (f"{_FILE}[model.shape]\n{_SHAPE}".replace("10000", "1000"), "more than its weights"),
        (f'{_NAMED}[[model.variant]]\nrepo = "x"\n', "owner/name"),
        (_REPO, "path .* repo"),
        (f'{_REPO}files = ["../x.gguf"]\n', "files .* model x"),
        (f'{_REPO}files = ["x.gguf"]\nsha256 = ["1"]\n', "64 hexa"),
        (f'{_REPO}files = ["x.gguf"]\nsize_bytes = [1, 2]\n', "as many"),
        (f'{_FILE}repo = "a/b"\n', "path and a repo"),
        (_FILE.replace("[[model.", 'drafts = ["none-such"]\n[[model.'), "none-such"),
        (_FILE * 2, "two .* x"),
    ],
)
def test_malformed_catalogs(own: Write, text: str, reason: str) -> None:
    path = own(text)
    with pytest.raises(CatalogError, match=reason) as error:
        load_catalog()
    assert str(path) in error.value.message


def test_a_named_catalog_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEEDGE_CATALOG", str(tmp_path / "absent.toml"))
    with pytest.raises(CatalogError, match=r"absent\.toml"):
        load_catalog()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:a/b", HubReference("a/b")),
        ("hf:a/b:Q4_K_M", HubReference("a/b", quant="Q4_K_M")),
        ("a/b:Q4_K_M", HubReference("a/b", quant="Q4_K_M")),
        ("hf.co/a/b:q8_0", HubReference("a/b", quant="q8_0")),
        ("hf:a/b:sub/x.gguf", HubReference("a/b", file="sub/x.gguf")),
        ("hf:a/b@v1:x.gguf", HubReference("a/b", "v1", file="x.gguf")),
        ("https://huggingface.co/a/b/resolve/main/sub/x.gguf?download=true", HubReference("a/b", file="sub/x.gguf")),
        ("https://huggingface.co/a/b/blob/v2/x.gguf", HubReference("a/b", "v2", file="x.gguf")),
        ("a/b", None),
        ("a.gguf", None),
        ("mine", None),
    ],
)
def test_references(text: str, expected: HubReference | None) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize("text", ["hf:", "hf:a", "hf:a/b/c", "hf:../b:x", "hf:a/b:../x.gguf", "hf:a/b:/x.gguf"])
def test_malformed_references(text: str) -> None:
    with pytest.raises(InputError):
        parse_reference(text)


def test_choosing_a_file() -> None:
    listed = [
        HubFile(name)
        for name in (
            "README.md",
            "mmproj-F16.gguf",
            "m-Q4_K_M.gguf",
            "m-UD-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            *all_parts("Q8_0/m-Q8_0-00001-of-00002.gguf"),
            "broken-Q6_K-00001-of-00002.gguf",
        )
    ]

    def chosen(**what: str) -> list[str]:
        return [file.path for file in choose_files(HubReference("a/b", **what), listed)]

    assert chosen() == ["m-Q4_K_M.gguf"]
    assert chosen(quant="q4_k_m") == ["m-Q4_K_M.gguf"]
    assert chosen(quant="UD-Q4_K_M") == ["m-UD-Q4_K_M.gguf"]
    assert chosen(quant="Q8_0") == all_parts("Q8_0/m-Q8_0-00001-of-00002.gguf")
    assert chosen(file="Q8_0/m-Q8_0-00002-of-00002.gguf") == all_parts("Q8_0/m-Q8_0-00001-of-00002.gguf")
    assert chosen(file="mmproj-F16.gguf") == ["mmproj-F16.gguf"]
    for what, reason in [("Q4", "no file"), ("Q2_K", "no file"), ("Q6_K", "lacks broken-Q6_K-00002")]:
        with pytest.raises(InputError, match=reason):
            chosen(quant=what)
    with pytest.raises(InputError, match="GGUF"):
        choose_files(HubReference("a/b"), [HubFile("model.safetensors")])
    with pytest.raises(InputError, match="several models"):
        choose_files(HubReference("a/b"), [HubFile("x-Q5_0.gguf"), HubFile("y-Q6_K.gguf")])


def test_cached_models_are_found(own: Write) -> None:
    own(_PAIR)
    with pytest.raises(ModelNameError, match=r"mine \(4 bytes\)"):
        locate("mine")
    link = store("me/mine-GGUF", "mine-Q4_0.gguf", blob="0" * 64)
    with pytest.raises(ModelNameError):  # another content than the catalog's
        locate("mine")
    link.unlink()
    link = store("me/mine-GGUF", "mine-Q4_0.gguf", blob=_SHA)
    assert locate("mine").path == link
    assert locate("hf:me/mine-GGUF").path == link
    assert locate("me/mine-GGUF:q4_0").path == link
    parts = all_parts("q8/mine-Q8_0-00001-of-00002.gguf")
    first = store("me/mine-GGUF", parts[0])
    with pytest.raises(ModelNameError):  # one of two parts
        locate("mine:Q8_0")
    store("me/mine-GGUF", parts[1], blob="d" * 64)
    assert locate("mine:Q8_0").path == first
    with pytest.raises(InputError, match="several files"):
        locate("hf:me/mine-GGUF")
    assert want_pair(load_catalog(), "mine", no_draft=True)[0].local == link


def test_a_revision_is_that_one_alone(own: Write) -> None:
    link = store("me/other-GGUF", "other-Q4_0.gguf", blob=_SHA)
    again = link.parents[1] / ("e" * 40) / link.name
    again.parent.mkdir()
    again.symlink_to(link.resolve())
    (link.parents[2] / "refs").mkdir(exist_ok=True)
    (link.parents[2] / "refs" / "v2").write_text("e" * 40)
    assert locate("hf:me/other-GGUF@v2:other-Q4_0.gguf").path == again
    with pytest.raises(ModelNameError):
        locate("hf:me/other-GGUF@v3:other-Q4_0.gguf")
    removal = plan_removal(load_catalog(), "hf:me/other-GGUF@v2:other-Q4_0.gguf")
    assert removal.links == (again,) and not removal.blobs  # main has the same content


def test_odd_names_in_the_cache(own: Write) -> None:
    link = store("me/odd-GGUF", "X.GGUF")
    store("me/odd-GGUF", "m-00001-of-00000.gguf", blob="d" * 64)
    (link.parents[1] / "gone").symlink_to("nowhere")
    assert locate("hf:me/odd-GGUF:X.GGUF").path == link
    assert {model.files for model in cached_models()} >= {("X.GGUF",), ("m-00001-of-00000.gguf",)}


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-oss-20b").write_bytes(b"GGUF")
    assert locate("gpt-oss-20b").path == Path("gpt-oss-20b")
    for path in ("absent.gguf", "./absent", "/absent", "sub/absent.gguf"):
        assert locate(path).path == Path(path)  # llama.cpp's side says that it is not there
    with pytest.raises(ModelNameError, match="'absent'"):
        locate("absent")


def test_pairs(own: Write, capfd: pytest.CaptureFixture[str]) -> None:
    own(_PAIR)
    target = store("me/mine-GGUF", "mine-Q4_0.gguf", blob=_SHA)
    assert resolve_models(Path("mine"), None) == ModelFiles(target, None)
    assert "mine-draft:Q8_0" in capfd.readouterr().err.replace("\n", " ")
    small = store("me/draft-GGUF", "draft-Q4_0.gguf", blob="e" * 64)
    assert resolve_models(Path("mine"), None).draft is None  # the catalog names its Q8_0
    draft = store("me/draft-GGUF", "draft-Q8_0.gguf")
    assert resolve_models(Path("mine"), None) == ModelFiles(target, draft, 2)
    said = " ".join(capfd.readouterr().err.split())
    assert "mine-draft:Q8_0" in said
    fixed = EngineOptions(model=Path("mine")).config()
    assert (fixed.gamma, fixed.auto_gamma) == (2, False)
    assert "--draft-max" in capfd.readouterr().err
    assert EngineOptions(model=Path("mine")).config(auto_gamma=True).auto_gamma
    assert "--draft-max" not in capfd.readouterr().err
    assert EngineOptions(model=Path("mine"), draft_max=3).config(auto_gamma=True).gamma == 3
    assert resolve_models(Path("mine"), "none") == ModelFiles(target, None)
    assert resolve_models(Path("mine"), "ngram") == ModelFiles(target, "ngram", 2)
    assert resolve_models(Path("mine"), "mtp") == ModelFiles(target, "mtp")
    assert resolve_models(Path("mine"), "mine-draft") == ModelFiles(target, small, 2)
    assert resolve_models(Path("bundled"), None) == ModelFiles(paths.bundled_target(), paths.bundled_draft())


def test_listing(own: Write) -> None:
    own(_PAIR)
    store("me/mine-GGUF", "mine-Q4_0.gguf", blob=_SHA)
    store("else/other-GGUF", "other.gguf", b"12345")
    stray = local.blob_file("else/stray-GGUF", "f" * 64, local.INCOMPLETE)
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"123")
    rows = {row.name: row for row in list_models(load_catalog(), everything=False)}
    assert set(rows) == {"bundled", "mine", "hf:else/other-GGUF:other.gguf", "hf:else/stray-GGUF"}
    assert (rows["mine"].state, rows["mine"].size_bytes, rows["mine"].drafts) == ("complete", 4, ("mine-draft:Q8_0",))
    assert rows["hf:else/other-GGUF:other.gguf"].have_bytes == 5
    assert (rows["hf:else/stray-GGUF"].state, rows["hf:else/stray-GGUF"].have_bytes) == ("partial", 3)
    everything = {row.name: row for row in list_models(load_catalog(), everything=True)}
    assert everything["mine:Q8_0"].state == "absent" and not everything["mine:Q8_0"].verified
    assert everything["mine-draft:Q8_0"].draft_of == ("mine",)


def test_cache_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert local.hub_cache() == tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "x"))
    assert local.hub_cache() == tmp_path / "x"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "y"))
    assert local.hub_cache() == tmp_path / "y" / "huggingface" / "hub"
    assert local.find_variant(Variant("Q4_0", "a/b", files=(HubFile("x.gguf"),))) is None
