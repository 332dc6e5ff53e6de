import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmsched.tree import BadTree, EntryKind, Tree, TreeEntry

DIGEST = hashlib.sha256(b"x").hexdigest()


def file(path, **changes):
    return TreeEntry(path, **{"size_bytes": 1, "sha256": DIGEST, **changes})


def link(path, target):
    return TreeEntry(path, EntryKind.LINK, target=target)


def test_bytes_read_back_to_an_equal_tree_with_the_same_digest():
    tree = Tree.of([file("b/c.py", mode=0o755), file("a.py"), link("b/l", "../a.py"), TreeEntry("out", EntryKind.DIR)])
    again = Tree.from_bytes(tree.to_bytes())
    assert again == tree
    assert again.digest == hashlib.sha256(tree.to_bytes()).hexdigest()
    assert [entry.path for entry in again.entries] == ["a.py", "b/c.py", "b/l", "out"]
    assert again.blobs == {DIGEST: 1}
    assert again.size_bytes == 2


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([file("/etc/passwd")], "is absolute"),
        ([file("../x")], "'..' segment"),
        ([file("a/../../x")], "'..' segment"),
        ([file("a//b")], "empty"),
        ([file("./a")], "'.'"),
        ([file("")], "1 to 1024 bytes"),
        ([file("a\0b")], "no NUL"),
        ([file("n" * 256)], "at most 255 bytes"),
        ([file("\udcff")], "not UTF-8"),
        ([file("a"), file("a")], "listed twice"),
        ([link("a", "b"), file("a/x")], "lies below 'a'"),
        ([file("a"), file("a/x")], "lies below 'a'"),
        ([file("a", mode=0o4755)], "permission bits"),
        ([file("a", sha256="zz")], "no SHA-256"),
        ([file("a"), file("b", size_bytes=7)], "not its size"),
        ([file("a", size_bytes=-1)], "-1 bytes"),
        ([link("a", "/etc/passwd")], "absolute path"),
        ([link("a", "../x")], "leads out"),
        ([link("d/a", "../../x")], "leads out"),
        ([link("d/e/s", "../.."), link("a", "d/e/s/../x")], "climbs after it has descended"),
        ([link("a", "")], "no usable target"),
        ([file("d/" * 64 + "f")], "64 folders deep, at most 63"),
    ],
)
def test_what_could_leave_the_folder_is_refused(entries, problem):
    with pytest.raises(BadTree) as caught:
        Tree.of(entries)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b'{"entries":[],"format":2}',
        b'{"entries":{},"format":1}',
        b'{"entries":[1],"format":1}',
        b'{"entries":[{"path":"a","kind":"device"}],"format":1}',
        b'{"entries":[{"path":"a","kind":"dir","mode":1}],"format":1}',
        b'{"entries": [], "format": 1}',
        b'{"entries":[{"kind":"link","path":"a","target":1}],"format":1}',
    ],
)
def test_a_manifest_that_is_not_canonical_is_refused(data):
    with pytest.raises(BadTree):
        Tree.from_bytes(data)


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_else(data):
    try:
        Tree.from_bytes(data)
    except BadTree:
        return


@given(st.lists(st.sampled_from(["a", "..", "b", "."]), min_size=1, max_size=6), st.integers(0, 3))
def test_accepted_links_resolve_inside_the_folder(tmp_path_factory, segments, depth):
    """Compared with the kernel's own resolution in a folder of real folders and the link under test."""
    root = tmp_path_factory.mktemp("tree")
    folder = root.joinpath(*["a"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    target = "/".join(segments)
    path = "/".join(["a"] * depth + ["link"])
    try:
        Tree.of([link(path, target)])
    except BadTree:
        return
    assert folder.joinpath(target).resolve().is_relative_to(root.resolve())
