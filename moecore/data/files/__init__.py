"""Files that sources read: class folders, captions, IDX, CIFAR; decoding and downloads."""
