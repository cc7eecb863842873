#!/bin/sh
# Fetch Fashion-MNIST from Debian's package dataset-fashion-mnist into data/raw/fashion-mnist, without root.
# Does nothing where the four files are there already. Their checksums are verified by the stage `prepare`.
set -eu

home=$(cd "$(dirname "$0")/.." && pwd)
target="$home/data/raw/fashion-mnist"
files="train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte"

complete() {
    for file in $files; do
        [ -s "$1/$file" ] || [ -s "$1/$file.gz" ] || return 1
    done
}

if complete "$target"; then
    echo "Fashion-MNIST is in $target already."
    exit 0
fi

for tool in apt-get dpkg; do
    if ! command -v "$tool" > /dev/null; then
        echo "$tool is not on this machine, so Debian's package cannot be fetched. Either set 'download: true' in the params of" >&2
        echo "fashion_mnist (from the authors, checked), or put these four files, plain or .gz, into $target:" >&2
        echo "  $files" >&2
        exit 1
    fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
if ! apt-get download dataset-fashion-mnist; then
    echo "apt-get could not download dataset-fashion-mnist: the package lists may be missing or old ('apt-get update', once, as root)," >&2
    echo "or the network is down. Without them: 'download: true' in the params of fashion_mnist." >&2
    exit 1
fi
dpkg -x ./*.deb unpacked
found="$scratch/unpacked/usr/share/datasets/fashion-mnist"
if ! complete "$found"; then
    echo "The package dataset-fashion-mnist does not hold the expected files; it has:" >&2
    find unpacked -type f >&2
    exit 1
fi
mkdir -p "$target"
for file in $files; do
    for ending in "" .gz; do
        if [ -s "$found/$file$ending" ]; then
            cp "$found/$file$ending" "$target/.$file$ending.part"
            mv "$target/.$file$ending.part" "$target/$file$ending"
        fi
    done
done
echo "Fashion-MNIST is in $target."
