"""Shipped files on their way in."""

import hashlib
import random

import pytest

from swarm_agent.http.blobs import PACK_TYPE, PACKED_BLOB_BYTES_LIMIT

HEADERS = {"Content-Type": PACK_TYPE}


def digest_of(data):
    return hashlib.sha256(data).hexdigest()


def frame(data, digest=""):
    return bytes.fromhex(digest or digest_of(data)) + len(data).to_bytes(8, "big") + data


async def pieces(data, size):
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def test_a_blob_is_stored_once_and_found(n1):
    data, path = b"content", f"/v1/blobs/{digest_of(b'content')}"
    assert (await n1.ask("HEAD", path)).status == 404
    assert [(await n1.ask("PUT", path, data=data)).status for _ in range(2)] == [201, 200]
    response = await n1.ask("HEAD", path)
    assert (response.status, response.headers["Content-Length"]) == (200, "7")
    document = await n1.post("/v1/blobs/missing", {"digests": [digest_of(data), "0" * 64, "0" * 64]})
    assert document == {"missing": ["0" * 64], "node": "n1"}


async def test_content_that_is_not_its_digest_is_refused(n1):
    response = await n1.ask("PUT", f"/v1/blobs/{'0' * 64}", data=b"x")
    assert (response.status, (await response.json(content_type=None))["code"]) == (422, "bad_blob")
    assert n1.agent.blobs.held_bytes == 0


@pytest.mark.parametrize("name", ["..%2F..%2Fetc%2Fpasswd", "a" * 63, "A" * 64, "%00" * 64])
async def test_a_name_that_is_no_digest_opens_nothing(n1, name):
    for method in ("PUT", "HEAD"):
        assert (await n1.ask(method, f"/v1/blobs/{name}")).status == 404


@pytest.mark.parametrize("size", [1, 7, 40, 41, 1_000, 65_536])
async def test_a_pack_is_unpacked_however_it_is_cut(n1, size):
    rng = random.Random(size)
    blobs = [rng.randbytes(length) for length in (0, 1, 39, 40, 41, 500, 3_000)]
    known = await n1.agent.blobs.put_bytes(blobs[3])
    body = b"".join(frame(blob) for blob in blobs)
    document = await (await n1.ask("POST", "/v1/blobs", data=pieces(body, size), headers=HEADERS)).json()
    assert document == {"stored": 6, "known": 1, "size_bytes": sum(map(len, blobs)), "node": "n1"}
    assert n1.agent.blobs.missing([digest_of(blob) for blob in blobs] + [known]) == ()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (frame(b"abc")[:-1], "1 bytes before the end"),
        (frame(b"abc") + b"x" * 39, "within the head"),
        (b"\0" * 32 + (PACKED_BLOB_BYTES_LIMIT + 1).to_bytes(8, "big"), "bytes"),
        (frame(b"abc", digest_of(b"abd")), "another digest"),
    ],
)
async def test_a_malformed_pack_is_refused_and_what_came_before_is_kept(n1, body, words):
    response = await n1.ask("POST", "/v1/blobs", data=frame(b"good") + body, headers=HEADERS)
    document = await response.json(content_type=None)
    assert (response.status, document["code"]) == (422, "bad_blob")
    assert words in document["detail"]
    assert n1.agent.blobs.missing([digest_of(b"good")]) == ()


async def test_a_pack_of_another_type_is_refused(n1):
    response = await n1.ask("POST", "/v1/blobs", data=b"x", headers={"Content-Type": "text/plain"})
    assert response.status == 415


@pytest.mark.parametrize("digests", [None, "abc", ["x"], [7], ["0" * 64] * 10_001])
async def test_a_malformed_question_is_refused(n1, digests):
    problem = await n1.post("/v1/blobs/missing", {"digests": digests}, 422)
    assert problem["errors"][0]["pointer"].startswith("/digests")


async def test_a_full_disk_is_told_as_such(n1, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", full)
    response = await n1.ask("PUT", f"/v1/blobs/{digest_of(b'x')}", data=b"x")
    monkeypatch.undo()
    assert (response.status, (await response.json(content_type=None))["code"]) == (507, "storage_full")
