"""The wire frame refuses, with a code, everything section by section (hazard F35)."""

import json
import struct

import numpy as np
import pytest
import xxhash

from compression import FrameError, Layout, decode, encode, read_header
from compression.frame import MAGIC


def arrays() -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(0).standard_normal((80, 80)).astype(np.float32)}


LAYOUT = Layout.from_arrays(arrays())


def frame(policy: str = "int8(256,rtn)") -> bytes:
    return encode(arrays(), LAYOUT, policy, seed=5, round_index=1, base="v0")


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def with_header(data: bytes, change) -> bytes:
    """The frame with its header document changed, lengths and checksum made right again."""
    (length,) = struct.unpack_from("<I", data, 8)
    document = json.loads(data[12 : 12 + length])
    text = change(document)
    if not isinstance(text, bytes):
        text = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return sealed(data[:8] + struct.pack("<I", len(text)) + text + data[12 + length : -8])


def code_of(data: bytes, layout: Layout = LAYOUT, **kwargs) -> str:
    with pytest.raises(FrameError) as caught:
        decode(data, layout, **kwargs)
    return caught.value.code


def test_the_unchanged_header_passes_through_the_helper():
    assert with_header(frame(), lambda document: None) == frame()


def test_prefix():
    good = frame()
    assert good[:4] == MAGIC == b"FCF1"
    assert code_of(sealed(b"XCF1" + good[4:-8])) == "magic"
    assert code_of(sealed(good[:4] + b"\x02" + good[5:-8])) == "version"
    assert code_of(sealed(good[:5] + b"\x01" + good[6:-8])) == "flags"
    assert code_of(sealed(good[:6] + b"\x01\x00" + good[8:-8])) == "flags"
    assert code_of(sealed(good[:8] + b"\xff\xff\xff\xff" + good[12:-8])) == "header_length"
    assert code_of(b"") == code_of(good[:19]) == "truncated"


def test_checksum_covers_every_byte():
    good = frame()
    for position in range(0, len(good), 97):
        flipped = bytearray(good)
        flipped[position] ^= 16
        assert code_of(bytes(flipped)) in ("magic", "version", "flags", "header_length", "checksum")
    assert code_of(good + b"\x00") == code_of(good[:-1]) == "checksum"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: d.update(extra=1), "header"),
        (lambda d: d.pop("seed"), "header"),
        (lambda d: d.update(round=1.0), "header"),
        (lambda d: d.update(round=-1), "header"),
        (lambda d: d.update(round=True), "header"),
        (lambda d: d.update(seed=1 << 63), "header"),
        (lambda d: d["groups"][0].update(more=1), "header"),
        (lambda d: d["groups"][0]["sections"][0].append(1), "header"),
        (lambda d: d.update(groups={}), "header"),
        (lambda d: b"{" + b'"base":"","base":""' + b"}", "header"),
        (lambda d: json.dumps(d, sort_keys=True).encode(), "header"),
        (lambda d: b"[" * 60000, "header"),
        (lambda d: b"\xff\xfe", "header"),
        (lambda d: b'{"numel":1e999}', "header"),
        (lambda d: b"NaN", "header"),
        (lambda d: d["groups"][0]["sections"][1].__setitem__(1, 1), "tiling"),
        (lambda d: d["groups"][0]["sections"].pop(), "tiling"),
        (lambda d: d.update(numel=1 << 40), "too_large"),
        (lambda d: d.update(numel=6401), "layout"),
        (lambda d: d.update(layout="0" * 64), "layout"),
        (lambda d: d.update(policy="int7"), "spec"),
        (lambda d: d.update(policy="int8"), "spec"),  # not canonical
        (lambda d: d.update(policy="int8(256,sr);min=4096"), "spec"),
        (lambda d: d["groups"][0].update(spec="int8(128,rtn)"), "section_size"),
        (lambda d: d["groups"][0].update(spec="int4(256,rtn)"), "spec"),
        (lambda d: d["groups"][0].update(spec="ecsq(step=0x1p99999)"), "spec"),
        (lambda d: d["groups"][0].update(spec="int8(256,rtn)|rans"), "spec"),
        (lambda d: d["groups"][0].update(nnz=6399), "nnz"),
        (lambda d: d["groups"].append({"nnz": 0, "sections": [], "spec": "exact"}), "groups"),
        (lambda d: d["groups"][0]["sections"][0].__setitem__(0, "sym"), "section_twice"),
        (lambda d: d["groups"][0]["sections"][0].__setitem__(0, "scales"), "sections"),
    ],
)
def test_header(change, code):
    assert code_of(with_header(frame(), change)) == code


def test_another_layout_and_another_base_are_refused():
    other = Layout.from_arrays({"w": np.zeros((80, 81), np.float32)})
    assert code_of(frame(), other) == "layout"
    assert code_of(frame(), base="v1") == "base"
    assert decode(frame(), LAYOUT, base="v0")["w"].shape == (80, 80)


def edited(policy: str, edit) -> bytes:
    """The frame with bytes of its body changed by `edit(body, header)` and sealed again."""
    data = frame(policy)
    header = read_header(data)
    body = bytearray(data[header.body_offset : -8])
    edit(body, header)
    return sealed(data[: header.body_offset] + bytes(body))


def set_bytes(position: int, new: bytes):
    return lambda body, header: body.__setitem__(slice(position, position + len(new)), new)


def set_in_section(kind: str, position: int, new: bytes):
    def edit(body, header):
        start = 0
        for name, length in header.groups[0].sections:
            if name == kind:
                at = start + (position if position >= 0 else length + position)
                body[at : at + len(new)] = new
            start += length

    return edit


@pytest.mark.parametrize(
    ("policy", "edit", "code"),
    [
        ("int8(256,rtn)", set_bytes(0, b"\x00\x00"), "scale"),  # scale 0 with symbols
        ("int8(256,rtn)", set_bytes(0, b"\x80\x7f"), "scale"),  # infinite
        ("int8(256,rtn)", set_bytes(0, b"\x40\x00"), "scale"),  # subnormal
        ("int8(256,rtn)", set_bytes(0, b"\x00\xbf"), "scale"),  # negative
        ("int8(256,rtn)", set_bytes(0, b"\x7f\x7f"), "scale"),  # 127 times it overflows
        ("int8(256,rtn)", set_in_section("sym", 5, b"\x80"), "symbol"),  # -128
        ("int4(64,rtn)", set_in_section("sym", 5, b"\x08"), "symbol"),  # -8
        ("int2(256,rtn)", set_in_section("sym", 5, b"\x02"), "symbol"),  # -2
        ("sign(4096)", set_bytes(0, b"\x00\x00\xc0\x7f"), "scale"),
        ("sign(4096)", set_in_section("sign", -1, b"\x80"), "padding"),
        ("had(4096)|lm2", set_bytes(0, b"\x00\x00\x80\xbf"), "scale"),
        ("topk(4096,64)|sign2|rice", set_bytes(0, b"\x00\x00\x80\xbf"), "scale"),
        ("topk(4096,64)|sign2|rice", set_in_section("idx", 0, b"\x00" * 40), "index"),
        ("topk(4096,64)|sign2|rice", set_in_section("idx", -1, b"\x80"), "index"),
        ("topk(4096,64)|sign2|rice", set_in_section("blen", 0, b"\x00"), "tiling"),
        ("topk(4096,64)|fp32|flat", set_in_section("idx", 0, b"\xff" * 8), "index"),
        ("topk(4096,64)|fp32|flat", set_in_section("val", 0, b"\x00\x00\xc0\x7f"), "non_finite"),
        ("ecsq(step=0.5)|rans", set_bytes(0, b"\x00\x00\xc0\x7f"), "levels"),
        ("ecsq(step=0.5)|rans", set_in_section("data", 2, b"\xff\x0f"), "rans_table"),
        ("ecsq(step=0.5)|rans", set_in_section("data", -2, b"\x5a\xa5"), "rans"),
        ("ecsq(step=0.5)|rans", set_in_section("blen", 0, b"\x01"), "tiling"),
        ("ecsq(step=0.5)|zstd", set_in_section("data", 0, b"\x00"), "zstd"),
        ("ecsq(step=0.5)|zstd", set_in_section("data", 4, b"\x00"), "zstd"),
        ("lossless", set_in_section("zstd", 0, b"\x00"), "zstd"),
        ("bf16", set_bytes(0, b"\x80\x7f"), "non_finite"),
        ("exact", set_bytes(0, b"\x00\x00\x80\x7f"), "non_finite"),
        ("lowrank(4)", set_bytes(0, b"\x00\x00\x80\x7f"), "non_finite"),
    ],
)
def test_body(policy, edit, code):
    data = edited(policy, edit)
    assert code_of(data) == code
    total = np.zeros(LAYOUT.numel)
    from compression import accumulate

    with pytest.raises(FrameError):
        accumulate(data, LAYOUT, total, 1.0)
    assert not total.any()


def test_a_boolean_byte_other_than_0_or_1_is_refused():
    mask = {"m": np.array([True, False])}
    layout = Layout.from_arrays(mask)
    data = encode(mask, layout)
    assert code_of(sealed(data[:-10] + b"\x02\x00"), layout) == "bool"


def test_zstd_bomb_is_not_inflated():
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))  # 16 MiB from about 500 bytes
    data = frame("ecsq(step=0.5)|zstd")
    header = read_header(data)
    body = data[header.body_offset : header.body_offset + 12] + struct.pack("<I", len(bomb)) + bomb
    changed = with_header(
        data[: header.body_offset] + body + b"\0" * 8,
        lambda d: d["groups"][0].update(sections=[["levels", 12], ["blen", 4], ["data", len(bomb)]]),
    )
    assert code_of(changed) == "zstd"


def test_other_objects_than_bytes_are_refused():
    for junk in ("text", 5, None):
        assert code_of(junk) == "not_bytes"
