#!/bin/sh
# Fetch exactly one commit of a git repository into a new folder, and assert that it is that one.
#
#     fetch_commit.sh DIRECTORY ADDRESS COMMIT [TAG]
#
# With a tag, the tag is what is fetched (build systems read the version from it) and it must point at the commit.
# One commit deep: history has no place in an image. COMMITS names a file that keeps a line `NAME COMMIT` for each, NAME
# being the last part of DIRECTORY.
set -eu

directory=${1:?directory}
address=${2:?address}
commit=${3:?commit}
tag=${4:-}
here=$(cd "$(dirname "$0")" && pwd)

git init --quiet "$directory"
git -C "$directory" remote add origin "$address"
if [ -n "$tag" ]; then
    git -C "$directory" fetch --quiet --depth 1 origin "refs/tags/$tag:refs/tags/$tag"
    git -C "$directory" checkout --quiet --detach "refs/tags/$tag"
else
    git -C "$directory" fetch --quiet --depth 1 origin "$commit"
    git -C "$directory" checkout --quiet --detach FETCH_HEAD
fi
# The assertion stands before the submodules: nothing of an unexpected commit is followed.
python3 "$here/assert_commit.py" "$directory" "$commit" ${tag:+--tag "$tag"}
# A source tree is removed once it is built, and what was installed from it does not always remember its commit.
if [ -n "${COMMITS:-}" ]; then
    printf '%s %s\n' "$(basename "$directory")" "$commit" >> "$COMMITS"
fi
git -C "$directory" submodule --quiet update --init --recursive --depth 1
