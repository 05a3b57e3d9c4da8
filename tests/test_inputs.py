"""What the compiler is handed: manifests from files and live trainers, owners files. Wrong ones are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from attrs import define, frozen
from hypothesis import given
from hypothesis import strategies as st

from rdtplan.errors import InputError
from rdtplan.inputs.manifests import from_weight_source, read_manifest, to_json
from rdtplan.inputs.owners import OwnerRule, read_owner_rules, resolve_owners
from rdtplan.ir.manifest import SourceTensor, build_manifest

Tensors = dict[str, tuple[str, list[int]]]
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def header_of(tensors: Tensors) -> dict[str, Any]:
    """A safetensors header whose data lie in the order given."""
    at = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in tensors.items():
        nbytes = SIZES[dtype]
        for n in shape:
            nbytes *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return header


def write_header(path: Path, header: Any, nbytes: int | None = None) -> Path:
    """A safetensors file of any header, sound or not. `nbytes` of data follow; by default what it claims."""
    text = json.dumps(header).encode()
    if nbytes is None:
        nbytes = max([v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"], default=0)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    return path


def write_tensors(path: Path, tensors: Tensors) -> Path:
    return write_header(path, header_of(tensors))


def names(entries: list[SourceTensor]) -> list[str]:
    return [e.name for e in entries]


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        build_manifest(read_manifest(path))
    message = f"{caught.value.code}: {caught.value.message}"
    assert caught.value.code in ("RDT103", "RDT104", "RDT105", "RDT106"), message
    return message


# -- safetensors ---------------------------------------------------------------------------------------------


def test_one_file_in_the_order_of_its_data(tmp_path: Path) -> None:
    header = header_of({"b": ("BF16", [2, 3]), "a": ("F8_E4M3", []), "c": ("F32", [0, 4])})
    path = write_header(tmp_path / "model.safetensors", dict(sorted(header.items())))
    assert read_manifest(path) == [
        SourceTensor("b", "bfloat16", (2, 3)),
        SourceTensor("a", "float8_e4m3fn", ()),
        SourceTensor("c", "float32", (0, 4)),
    ]


def test_a_real_file_reads_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "w": torch.zeros(4, 6, dtype=torch.bfloat16),
        "s": torch.zeros(2, dtype=torch.float32),
        "q": torch.zeros(3, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = {e.name: (e.dtype, e.shape) for e in read_manifest(tmp_path / "model.safetensors")}
    assert found == {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}


def test_no_data_is_read(tmp_path: Path) -> None:
    """A terabyte of weights behind the header costs nothing: the file is sparse."""
    path = tmp_path / "model.safetensors"
    header = {"w": {"dtype": "BF16", "shape": [1 << 20, 1 << 19], "data_offsets": [0, 1 << 40]}}
    write_header(path, header, 0)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + (1 << 40))
    assert read_manifest(path) == [SourceTensor("w", "bfloat16", (1 << 20, 1 << 19))]


LAYERED: Tensors = {
    "lm_head.weight": ("BF16", [4, 2]),
    "model.embed_tokens.weight": ("BF16", [4, 2]),
    "model.layers.0.w": ("BF16", [2]),
    "model.layers.10.w": ("BF16", [2]),
    "model.layers.2.mlp.experts.11.w": ("BF16", [2]),
    "model.layers.2.mlp.experts.3.w": ("BF16", [2]),
    "model.norm.weight": ("BF16", [2]),
}
NATURAL = [
    "model.embed_tokens.weight",
    "model.layers.0.w",
    "model.layers.2.mlp.experts.11.w",
    "model.layers.2.mlp.experts.3.w",
    "model.layers.10.w",
    "lm_head.weight",
    "model.norm.weight",
]


def test_layers_come_in_natural_order(tmp_path: Path) -> None:
    """Sorted headers put layer 10 before layer 2, and the head first."""
    write_tensors(tmp_path / "model.safetensors", LAYERED)
    assert names(read_manifest(tmp_path)) == NATURAL


def test_files_of_a_directory_and_their_index(tmp_path: Path) -> None:
    items = list(LAYERED.items())
    files = {"a.safetensors": dict(items[::2]), "b.safetensors": dict(items[1::2])}
    for file, tensors in files.items():
        write_tensors(tmp_path / file, tensors)
    plain = read_manifest(tmp_path)
    assert sorted(names(plain)) == sorted(LAYERED)
    assert [n for n in names(plain) if ".layers." in n] == NATURAL[1:5]
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}))
    assert names(read_manifest(tmp_path)) == NATURAL == names(read_manifest(index))


def test_the_index_says_which_file_a_name_is_in(tmp_path: Path) -> None:
    """A name that stands in two files is taken from the one that the index names; strays are left out."""
    write_tensors(tmp_path / "a.safetensors", {"w": ("BF16", [2])})
    write_tensors(tmp_path / "b.safetensors", {"w": ("F32", [3]), "stray": ("F32", [3]), "v": ("BF16", [1])})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    assert read_manifest(tmp_path) == [
        SourceTensor("w", "bfloat16", (2,)),
        SourceTensor("v", "bfloat16", (1,)),
    ]


GOOD = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (5, "lacks 'dtype'"),
        ({k: v for k, v in GOOD.items() if k != "dtype"}, "lacks 'dtype'"),
        ({k: v for k, v in GOOD.items() if k != "shape"}, "lacks 'shape'"),
        ({k: v for k, v in GOOD.items() if k != "data_offsets"}, "lacks 'data_offsets'"),
        ({**GOOD, "dtype": "Q4"}, "dtype: 'Q4' is none of BOOL"),
        ({**GOOD, "dtype": ["BF16"]}, "dtype: ['BF16'] is none of"),
        ({**GOOD, "shape": 6}, "shape: expected an array of sizes, found 6"),
        ({**GOOD, "shape": ["2", 3]}, "shape: expected an array of sizes"),
        ({**GOOD, "shape": [2.0, 3]}, "shape: expected an array of sizes"),
        ({**GOOD, "shape": [-2, -3]}, "shape: expected an array of sizes"),
        ({**GOOD, "data_offsets": [0, "12"]}, "data_offsets: expected [begin, end]"),
        ({**GOOD, "data_offsets": [0, 12, 13]}, "data_offsets: expected [begin, end]"),
        ({**GOOD, "data_offsets": [-12, 0]}, "data_offsets: expected [begin, end]"),
        ({**GOOD, "data_offsets": [12, 0]}, "data_offsets: -12 bytes"),
        ({**GOOD, "data_offsets": [0, 11]}, "data_offsets: 11 bytes, BF16 [2, 3] has 12"),
    ],
)
def test_a_malformed_header_entry_is_named(tmp_path: Path, entry: Any, words: str) -> None:
    path = write_header(tmp_path / "model.safetensors", {"fine": GOOD, "odd.weight": entry}, 100)
    message = refusal(path)
    assert message.startswith(f"RDT104: {path}: header entry 'odd.weight'") and words in message


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"w": GOOD}).encode()
    for content, words in (
        (b"", "is truncated: 0 bytes"),
        (b"1234567", "is truncated: 7 bytes"),
        (struct.pack("<Q", 10), "its header claims 10 bytes, the file has 8"),
        (struct.pack("<Q", 1 << 62) + b"{}", "its header claims 4,611,686,018,427,387,904 bytes"),
        (struct.pack("<Q", 3) + b"{x}", "the header is not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "the header is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "the header is no object of tensors, found list"),
        (struct.pack("<Q", len(text)) + text + bytes(11), "'w' ends at byte"),
    ):
        path.write_bytes(content)
        message = refusal(path)
        assert message.startswith(f"RDT104: {path}") and words in message, message
    path.unlink()
    path.mkdir()
    assert refusal(path).startswith(f"RDT103: no safetensors file in {path}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "has no 'weight_map' object"),
        ('{"weight_map": []}', "has no 'weight_map' object"),
        ('{"weight_map": {"w": 5}}', "weight_map: 'w': expected a file name, found 5"),
        ('{"weight_map": {"w": ["a.safetensors"]}}', "weight_map: 'w': expected a file name"),
        (
            '{"weight_map": {"x": "a.safetensors"}}',
            "places 'x' in a.safetensors, whose header does not have it",
        ),
        ('{"weight_map": {"w": "none.safetensors"}}', "none.safetensors cannot be read: No such file"),
        ('{"weight_map": {}}', "it names no tensor"),
    ],
)
def test_a_malformed_index_is_named(tmp_path: Path, text: str, words: str) -> None:
    write_tensors(tmp_path / "a.safetensors", {"w": ("BF16", [2])})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    message = refusal(tmp_path)
    assert words in message and ("tensor" in words or str(tmp_path) in message)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").startswith(f"RDT103: manifest {tmp_path / 'none'} does not exist")
    assert refusal(tmp_path).startswith(f"RDT103: no safetensors file in {tmp_path}")
    write_tensors(tmp_path / "a.safetensors", {"w": ("BF16", [2])})
    write_tensors(tmp_path / "b.safetensors", {"w": ("BF16", [2])})
    assert refusal(tmp_path) == "RDT106: manifest: source name 'w' stands at entries 0 and 1"


# -- JSON ----------------------------------------------------------------------------------------------------


def test_json_forms(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(
        json.dumps(
            [
                ["a", "bfloat16", [2, 3]],
                ["b", "torch.float32", []],
                ["c", "F8_E4M3", [0]],
                {"name": "d", "dtype": "BF16", "shape": [1], "owners": [3, 1, 3]},
                {"name": "e", "dtype": "int8", "shape": [1], "comment": "anything"},
            ]
        )
    )
    assert read_manifest(path) == [
        SourceTensor("a", "bfloat16", (2, 3)),
        SourceTensor("b", "float32", ()),
        SourceTensor("c", "float8_e4m3fn", (0,)),
        SourceTensor("d", "bfloat16", (1,), (1, 3)),
        SourceTensor("e", "int8", (1,)),
    ]


@given(
    st.lists(
        st.builds(
            SourceTensor,
            st.text(st.characters(codec="utf-8"), min_size=1),
            st.sampled_from(("bfloat16", "float32", "float8_e8m0fnu")),
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
            st.none() | st.lists(st.integers(0, 9), unique=True).map(lambda r: tuple(sorted(r))),
        ),
        unique_by=lambda e: e.name,
    )
)
def test_json_round_trip(tmp_path_factory: pytest.TempPathFactory, entries: list[SourceTensor]) -> None:
    path = tmp_path_factory.getbasetemp() / "manifest.json"
    path.write_bytes(to_json(entries))
    assert read_manifest(path) == entries


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (5, "entry 1 is neither [name, dtype, shape] nor an object: 5"),
        (["w", "bfloat16"], "entry 1 is neither"),
        ({"name": "w", "dtype": "bfloat16"}, "entry 1 lacks 'shape'"),
        ({"dtype": "bfloat16", "shape": []}, "entry 1 lacks 'name'"),
        ([7, "bfloat16", []], "entry 1: name: expected a string, found 7"),
        (["", "bfloat16", []], "entry 1: name: expected a string, found ''"),
        (["w", 16, []], "entry 1 (w): dtype: expected a string, found 16"),
        (["w", "bfloat16", 3], "entry 1 (w): shape: expected an array of sizes, found 3"),
        (["w", "bfloat16", [3.0]], "entry 1 (w): shape: expected an array of sizes"),
        (["w", "bfloat16", [True]], "entry 1 (w): shape: expected an array of sizes"),
        (["w", "bfloat16", [-1]], "entry 1 (w): shape: expected an array of sizes, found [-1]"),
        ({"name": "w", "dtype": "BF16", "shape": [], "owners": 3}, "entry 1 (w): owners: expected an array"),
        (
            {"name": "w", "dtype": "BF16", "shape": [], "owners": ["0"]},
            "entry 1 (w): owners: expected an array",
        ),
        (["w", "bfloat17", []], "'w' has dtype 'bfloat17', which is none of bfloat16"),
        (["\ud800", "bfloat16", []], "is not a name that UTF-8 can spell"),
    ],
)
def test_a_malformed_json_entry_is_named(tmp_path: Path, item: Any, words: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps([["a", "bfloat16", [1]], item]))
    message = refusal(path)
    assert message.startswith("RDT104") and words in message, message
    assert str(path) in message or "manifest:" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "RDT104: {} is not JSON"),
        (b"[" * 200_000, "RDT104: {} is not JSON"),
        (b"\xff\xff", "RDT104: {} is not JSON"),
        (b"{}", "RDT104: {}: expected an array of [name, dtype, shape], found dict"),
        (b"[]", "RDT105: manifest: it names no tensor"),
        (
            b'[["a","BF16",[1]],["b","BF16",[1]],["a","BF16",[1]]]',
            "RDT106: manifest: source name 'a' stands at entries 0 and 2",
        ),
    ],
)
def test_a_malformed_json_manifest_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    assert refusal(path).startswith(words.format(path))


def test_a_negative_size_is_named_wherever_it_comes_from() -> None:
    with pytest.raises(InputError, match="'w' has shape \\[2, -1\\] with a negative size") as caught:
        build_manifest([SourceTensor("w", "bfloat16", (2, -1))])
    assert caught.value.code == "RDT104"


# -- live trainers -------------------------------------------------------------------------------------------


class Dtype:
    """Prints as torch's dtypes do."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@frozen
class Row:
    name: str
    dtype: Any
    shape: Any


@frozen
class OwnedRow(Row):
    owners: Any = None


class SourceOf032:
    """`metadata()`: rows without owners."""

    def metadata(self) -> list[Row]:
        return [Row("a", Dtype(), (2, 3)), Row("b", "float32", [])]


@define
class SourceOf033:
    """`metadata`: a property, rows with owners or without."""

    @property
    def metadata(self) -> Any:
        return iter([OwnedRow("a", Dtype(), (2, 3), {4, 1}), OwnedRow("b", "float32", ())])


def test_both_forms_of_weight_source() -> None:
    assert from_weight_source(SourceOf032()) == [
        SourceTensor("a", "bfloat16", (2, 3)),
        SourceTensor("b", "float32", ()),
    ]
    assert from_weight_source(SourceOf033()) == [
        SourceTensor("a", "bfloat16", (2, 3), (1, 4)),
        SourceTensor("b", "float32", ()),
    ]


def test_a_weight_source_of_torch_tensors() -> None:
    torch = pytest.importorskip("torch")

    class Source:
        def metadata(self) -> list[Row]:
            t = torch.zeros(4, 2, dtype=torch.float8_e4m3fn)
            return [Row("w", t.dtype, t.shape)]

    (entry,) = from_weight_source(Source())
    assert entry == SourceTensor("w", "float8_e4m3fn", (4, 2)) and type(entry.shape) is tuple


# -- owners --------------------------------------------------------------------------------------------------

OWNERS = """
[[own]]
names = "model.layers.[0-1].mlp.experts.*.up"
ranks = [3, 2, 3]

[[own]]
layers = "0-1, 8"
ranks = [0, 1]

[[own]]
layers = [2, 3]
names = ["*.w", "*.v"]
ranks = [2]

[[own]]
names = ["lm_head.*", "model.embed*"]
ranks = "all"
"""


def rules(tmp_path: Path, text: str, ranks: int = 4) -> tuple[OwnerRule, ...]:
    path = tmp_path / "owners.toml"
    path.write_text(text)
    return read_owner_rules(path, ranks)


@pytest.mark.parametrize(
    ("name", "owners"),
    [
        ("model.layers.0.mlp.experts.7.up", (2, 3)),
        ("model.layers.0.mlp.experts.7.down", (0, 1)),
        ("model.layers.8.w", (0, 1)),
        ("model.layers.3.w", (2,)),
        ("model.layers.3.x", ()),
        ("model.layers.4.w", ()),
        ("model.layers.10.w", ()),
        ("model.embed_tokens.weight", (0, 1, 2, 3)),
        ("lm_head.weight", (0, 1, 2, 3)),
        ("model.norm.weight", ()),
        ("x.lm_head.weight", ()),
    ],
)
def test_the_first_rule_that_matches_wins(tmp_path: Path, name: str, owners: tuple[int, ...]) -> None:
    entry = SourceTensor(name, "bfloat16", (1,))
    assert resolve_owners([entry], rules(tmp_path, OWNERS), 4) == (owners,)


def test_an_entry_of_the_manifest_may_name_its_owners(tmp_path: Path) -> None:
    entries = [SourceTensor("lm_head.w", "bfloat16", (1,), (3, 0, 3)), SourceTensor("b", "bfloat16", (1,))]
    assert resolve_owners(entries, rules(tmp_path, OWNERS), 4) == ((0, 3), ())
    assert resolve_owners(entries, None, 2) == ((0, 3), (0, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected only [[own]] tables, found nothing"),
        ("x = 1", "expected only [[own]] tables, found x"),
        ("own = []", "expected only [[own]] tables"),
        ("own = [1, 2]", "expected only [[own]] tables"),
        ("[own]\nranks = [0]", "expected only [[own]] tables"),
        ("[[own]]\nnames = 'a'\nranks = [0]\n[other]\n", "found other, own"),
        ("[[own]]\nnames = ", "is not TOML"),
        ("[[own]]\nranks = [0]", "number 1: it matches nothing"),
        ("[[own]]\nnames = []\nranks = [0]", "number 1: it matches nothing"),
        ("[[own]]\nnames = 'a'\nrank = [0]", "number 1: unknown key 'rank'; keys are names, layers, ranks"),
        (
            "[[own]]\nnames = 5\nranks = [0]",
            "number 1: names: expected a pattern or a list of patterns, found 5",
        ),
        ("[[own]]\nnames = ['a', 5]\nranks = [0]", "number 1: names: expected a pattern"),
        ("[[own]]\nnames = 'a'", 'number 1: ranks: expected a list of ranks or "all", found None'),
        ("[[own]]\nnames = 'a'\nranks = []", "number 1: ranks: expected a list"),
        ("[[own]]\nnames = 'a'\nranks = 'some'", "number 1: ranks: expected a list"),
        ("[[own]]\nnames = 'a'\nranks = [true]", "number 1: ranks: expected a list"),
        (
            "[[own]]\nnames = 'a'\nranks = [0, 4]",
            "number 1: rank 4 does not exist, the trainer has ranks 0 to 3",
        ),
        ("[[own]]\nnames = 'a'\nranks = [-1]", "number 1: rank -1 does not exist"),
        *(
            (
                f"[[own]]\nnames = 'a'\nranks = 'all'\n[[own]]\nlayers = {layers}\nranks = [0]",
                "number 2: layers:",
            )
            for layers in ("'x'", "''", "'1-'", "'-1'", "'1-2-3'", "'7-4'", "'0-999999999999'", "4.5", "true")
        ),
        *(
            (f"[[own]]\nlayers = {layers}\nranks = [0]", "number 1: layers: expected")
            for layers in ("[]", "[-1]", "[true]", "[1.0]", "['a']", "[[1]]", "{a = 1}", "1979-05-27")
        ),
    ],
)
def test_a_malformed_owners_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        rules(tmp_path, text)
    assert caught.value.code == "RDT107"
    assert str(tmp_path / "owners.toml") in caught.value.message and words in caught.value.message


def test_an_owners_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    for path, words in (
        (tmp_path / "none.toml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "latin.toml", "is not TOML"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            read_owner_rules(path, 1)
        assert caught.value.code == "RDT107" and str(path) in caught.value.message


def test_one_layer_may_be_a_number_and_a_list_may_be_mixed(tmp_path: Path) -> None:
    (rule,) = rules(tmp_path, "[[own]]\nlayers = 4\nranks = [0]")
    assert rule.layers == {4}
    (rule,) = rules(tmp_path, "[[own]]\nlayers = [1, '3-4']\nranks = [0]")
    assert rule.layers == {1, 3, 4}
