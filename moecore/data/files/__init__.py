"""Reading, decoding and downloading the files of data sources: images, captions and fonts."""
