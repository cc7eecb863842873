#!/bin/sh
# Fetch the fonts of Debian's package fonts-noto-core into data/raw/fonts, without root.
# Does nothing where they are installed or fetched. Without them, tests and studies of the source `scripts` cannot run: no error here.
set -eu

home=$(cd "$(dirname "$0")/.." && pwd)
target="$home/data/raw/fonts"
for folder in "$target" /usr/share/fonts/truetype/noto; do
    if ls "$folder"/NotoSans-Regular.ttf > /dev/null 2>&1; then
        echo "The Noto fonts are in $folder already."
        exit 0
    fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
if ! (apt-get download fonts-noto-core && dpkg -x ./*.deb unpacked); then
    echo "The package fonts-noto-core could not be fetched. For the source 'scripts', install it, or name a folder of fonts as its 'root'." >&2
    exit 0
fi
mkdir -p "$home/data/raw"
rm -rf "$target.part"
cp -r unpacked/usr/share/fonts/truetype/noto "$target.part"
mv "$target.part" "$target"
echo "The Noto fonts are in $target."
