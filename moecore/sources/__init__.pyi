"""Written by `python -m tools.stubs`: the parts of a family and their settings."""

from typing import Literal
from moecore.data.sources.base import Source as Source
from moecore.data.sources.bids import Bids as _Bids
from moecore.data.sources.captioned_mosaic import CaptionedMosaic as _CaptionedMosaic
from moecore.data.sources.cifar import Cifar as _Cifar
from moecore.data.sources.ciphers import Ciphers as _Ciphers
from moecore.data.sources.clusters import Clusters as _Clusters
from moecore.data.sources.coco_captions import CocoCaptions as _CocoCaptions
from moecore.data.sources.dialects import Dialects as _Dialects
from moecore.data.sources.digits import Digits as _Digits
from moecore.data.sources.docstrings import Docstrings as _Docstrings
from moecore.data.sources.fashion_mnist import FashionMnist as _FashionMnist
from moecore.data.sources.file_cohort import Dseg as _Dseg
from moecore.data.sources.file_cohort import TissueMapPatterns as _TissueMapPatterns
from moecore.data.sources.flickr30k import Flickr30k as _Flickr30k
from moecore.data.sources.image_folder import ImageFolder as _ImageFolder
from moecore.data.sources.imagenet import Imagenet as _Imagenet
from moecore.data.sources.mosaic import Mosaic as _Mosaic
from moecore.data.sources.phantom import Phantom as _Phantom
from moecore.data.sources.scripts import Scripts as _Scripts
from moecore.data.sources.spreadsheet import ColumnNames as _ColumnNames
from moecore.data.sources.spreadsheet import Spreadsheet as _Spreadsheet
from moecore.data.sources.subspaces import Subspaces as _Subspaces
from moecore.data.sources.two_cohorts import TwoCohorts as _TwoCohorts
from moecore.data.sources.wikitext import Wikitext as _Wikitext
from moecore.data.text.tokenizers import BpeFileSettings as _BpeFileSettings
from moecore.data.text.tokenizers import WordSettings as _WordSettings

class Bids(_Bids):
    """One T1-weighted volume per row of participants.tsv (or of sessions.tsv).

    Volumes are skull-stripped or have a brain mask, and share one space. They are turned to
    canonical axes, resampled, cropped or padded, and normalised inside the brain; they are not
    registered."""
    voxel_mm: float = 3.0
    """Voxel side, mm; volumes are resampled"""
    size: tuple[int, int, int] = ...
    """Right, anterior, superior, in voxels; multiples of 16"""
    seed: int = 0
    """Seed of the splits, and of simulated people"""
    validation: float = 0.15
    """Share of participants for validation"""
    test: float = 0.25
    """Share of the participants for the test"""
    age_groups: int = 8
    """Equal age groups, per sex, of the splits"""
    test_sites: tuple[str, ...] = ...
    """Sites that are the test set; (): drawn"""
    root: str
    """Folder with participants.tsv; derivatives may lie below it"""
    t1: str = '{folder}/anat/{prefix}*_T1w.nii*'
    """T1w volume: a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix} for
    sub-01 or sub-01_ses-1, * for anything"""
    mask: str | None = None
    """Brain mask, as t1; null: voxels over half tissue"""
    maps: _TissueMapPatterns | None = ...
    """Tissue as probability maps; null: none"""
    dseg: _Dseg | None = None
    """Tissue as one label map; needs maps: null"""
    diagnoses: tuple[str, ...] | None = None
    """Only these of the column `diagnosis`; null: all"""
    train_diagnoses: tuple[str, ...] | None = None
    """Participants with others are only in test; null: no rule"""
    on_error: Literal['stop', 'skip'] = 'stop'
    """On problems: stop and list all of them, or skip those subjects"""
    cache: str = '.state/volumes'
    """Folder: prepared volumes of unchanged files"""
    name: str = 'cohort'
    """Name of the cohort in the card and the report"""
    licence: str = 'not stated'
    """Licence of the data, for the card"""

class BpeFileSettings(_BpeFileSettings):
    """Settings of a byte-pair tokenizer from a file."""
    file: str
    """tokenizer.json of the `tokenizers` library, such as CLIP's"""
    words: int = 49408
    """Number of words of its vocabulary, checked"""

class CaptionedMosaic(_CaptionedMosaic):
    """Mosaics captioned with the class of each cell; no other split has a test mosaic's layout."""
    source: _FashionMnist | _Digits
    """Source of the cells; its splits stay separate"""
    train: int = 20000
    """Number of mosaics for training"""
    validation: int = 1000
    """Number of mosaics for validation"""
    test: int = 1000
    """Number of mosaics for the test"""
    captions: int = 5
    """Wordings per mosaic"""
    context: int = 36
    """Tokens of a caption"""
    seed: int = 0
    """Draws layouts and images"""

class Cifar(_Cifar):
    """CIFAR-10 or -100 from the binary files or archive; the pickled version is refused."""
    seed: int = 0
    """Seed of the splits and of the limits below"""
    validation: float = 0.1
    """Share (below 1) or number of training images"""
    train_limit: int | None = None
    """Images, in proportion to classes"""
    test_limit: int | None = None
    """Images, in proportion to classes"""
    root: str | tuple[str, ...] = 'data/raw/cifar'
    """Folder, or folders in order, with the .bin files or archive"""
    size: int = 32
    """Height and width, pixels; bilinear if not 32"""
    download: bool = False
    """Download missing files to the first root, checked"""
    only_classes: tuple[str, ...] = ...
    """Names of classes to keep; empty: all"""
    test_unused: bool = False
    """Also test on training images beyond train_limit"""
    classes: Literal[10, 100] = 10
    """10: CIFAR-10; 100: CIFAR-100, fine labels"""

class Ciphers(_Ciphers):
    """Text of docstrings, each paragraph encrypted by one of D ciphers.

    A cipher permutes all words of the vocabulary except ``<eos>`` and ``<unk>``. A word's kind is
    its paragraph's cipher; ``<eos>`` has kind 0, since the next cipher is not known there."""
    block: int = 64
    """Tokens per block, M; a block is one item"""
    context: int = 3
    """Blocks read before each block, where models start without memory; model.depth · model.span /
    block of them are as good as all of the text"""
    packages: tuple[str, ...] = ...
    """installed distributions whose docstrings are read"""
    validation: float = 0.05
    """share of the files"""
    test: float = 0.05
    """share of the files"""
    words: int | None = None
    """Vocabulary size V; rarer: <unk>; null: all"""
    dialects: int = 12
    """Number of ciphers D"""
    zipf: float = 0.0
    """Cipher n occurs ∝ n^−zipf; 0: equally often"""
    seed: int = 0
    """Draws the ciphers, and the cipher of each paragraph"""

class Clusters(_Clusters):
    """Images of K clusters, labelled by a random sign; another cluster's feature disturbs each.

    Each cluster k has two random unit vectors of d numbers, its feature and its centre. Its images
    have P = g² patches of d = p² pixels, in random order: one is y·α times the feature of k, one β
    times its centre, one ε·γ times the feature of another cluster, the others are noise. y and ε
    are −1 or 1, α, β, γ factors, all random. The label is y; models do not see k, the image's kind."""
    train: int = 16000
    """Number of images for training"""
    validation: int = 4000
    """Number of images for validation"""
    test: int = 10000
    """Number of images for the test"""
    seed: int = 0
    """Draws the rule and the images"""
    clusters: int = 4
    """Number of clusters K"""
    patch: int = 7
    """Side of a patch p, pixels"""
    grid: int = 2
    """Patches along each side of an image"""
    noise: float = 1.0
    """Mean norm of patch noise; centres: 1 to 2"""

class CocoCaptions(_CocoCaptions):
    """Images of COCO with captions; splits are Karpathy's (from his file) or drawn by the seed."""
    root: str | tuple[str, ...]
    """Folder, or folders in order, of the images"""
    size: int = 224
    """Height and width in pixels"""
    channels: Literal[1, 3] = 3
    """1 grey, 3 colour; images are converted"""
    captions: int = 5
    """Captions per image: its first ones"""
    context: int = 77
    """Tokens of a caption; CLIP: 77"""
    tokenizer: _WordSettings | _BpeFileSettings = ...
    """words: of the captions; bpe: of a file, as CLIP's"""
    validation: float = 0.1
    """Share of images, without a split file"""
    test: float = 0.1
    """Share of images, without a split file"""
    train_limit: int | None = None
    """At most this many training images"""
    test_limit: int | None = None
    """At most this many test images"""
    on_error: Literal['stop', 'skip'] = 'stop'
    """On unreadable images: stop and list all of them, or skip them"""
    seed: int = 0
    """Draws splits and limits"""
    annotations: tuple[str, ...] = ...
    """captions_train2014.json and captions_val2014.json; not with `karpathy`"""
    karpathy: str | None = None
    """dataset_coco.json: split 113,287/5,000/5,000"""
    folders: tuple[str, ...] = ...
    """per annotation file"""

class ColumnNames(_ColumnNames):
    """The table's names for the columns that a cohort uses; null for a missing column."""
    participant_id: str = 'participant_id'
    age: str = 'age'
    """At the scan, years"""
    sex: str = 'sex'
    session_id: str | None = None
    site: str | None = None
    diagnosis: str | None = None
    split: str | None = None
    """train, validation or test; empty: drawn"""

class Dialects(_Dialects):
    """Images of ``source``, each in one of D dialects: changed pixels, and a permutation of labels.

    ``mosaic``: ``grid`` × ``grid`` cells in separate dialects; a channel marks one cell, whose
    label is the mosaic's. ``cells``: without a mark, every cell has a label. An additional channel,
    which models do not see, has the dialect of every pixel."""
    source: _FashionMnist | _Digits
    """Source of the cells; its splits stay separate"""
    change: Literal['permutation', 'texture', 'colour', 'shifted_colour', 'rotation', 'frequency'] = 'permutation'
    """What a dialect does to an image"""
    dialects: int = 12
    """Number of dialects D"""
    families: int | None = None
    """Number of families F of D / F dialects with adjacent numbers, which share names, a change,
    and half of the pixels' places; null: dialects share nothing"""
    form: Literal['image', 'mosaic', 'cells'] = 'image'
    """One image; a mosaic with one marked cell, or with a label per cell"""
    grid: int = 2
    """Cells along each side of a mosaic"""
    zipf: float = 0.0
    """Dialect n occurs ∝ n^−zipf; 0: equally often"""
    train: int = 60000
    """Number of images for training"""
    validation: int = 5000
    """Number of images for validation"""
    test: int = 10000
    """Number of images for the test"""
    seed: int = 0
    """Draws dialects and combinations"""

class Digits(_Digits):
    """Digits of scikit-learn; the test set is drawn by the seed, stratified by class."""
    seed: int = 0
    """Seed of the splits and of the limits below"""
    validation: float = 0.1
    """Share (below 1) or number of training images"""
    train_limit: int | None = None
    """Images, in proportion to classes"""
    test_limit: int | None = None
    """Images, in proportion to classes"""
    size: int = 8
    """Height and width, pixels; bilinear if not 8"""
    test: float = 0.2
    """Share of each class for the test split"""

class Docstrings(_Docstrings):
    """Paragraphs of prose without duplicates, one per line, in the order of packages and files.

    A file's split depends on the sha256 of its path in the package, so a new release of one package
    moves no file of another. Words below MIN_WORD_COUNT training occurrences are ``<unk>``."""
    block: int = 64
    """Tokens per block, M; a block is one item"""
    context: int = 3
    """Blocks read before each block, where models start without memory; model.depth · model.span /
    block of them are as good as all of the text"""
    packages: tuple[str, ...] = ...
    """installed distributions whose docstrings are read"""
    validation: float = 0.05
    """share of the files"""
    test: float = 0.05
    """share of the files"""

class Dseg(_Dseg):
    """File name pattern of a label map (BIDS: dseg), and its numbers for each tissue."""
    pattern: str = '{folder}/anat/{prefix}*_dseg.nii*'
    """Map: a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix} for sub-01 or
    sub-01_ses-1, * for anything"""
    wm: tuple[int, ...] = ...
    """Numbers of white matter"""
    gm: tuple[int, ...] = ...
    """Numbers of grey matter"""
    csf: tuple[int, ...] = ...
    """Numbers of fluid"""

class FashionMnist(_FashionMnist):
    """Fashion-MNIST from four IDX files, plain or .gz, checked by hash; authors' test set."""
    seed: int = 0
    """Seed of the splits and of the limits below"""
    validation: float = 0.1
    """Share (below 1) or number of training images"""
    train_limit: int | None = None
    """Images, in proportion to classes"""
    test_limit: int | None = None
    """Images, in proportion to classes"""
    root: str | tuple[str, ...] = ...
    """Folder, or folders in order, that may hold the four files"""
    size: int = 28
    """Height and width, pixels; bilinear if not 28"""
    download: bool = False
    """Download missing files to the first root, checked"""
    only_classes: tuple[str, ...] = ...
    """Names of classes to keep; empty: all"""
    test_unused: bool = False
    """Also test on training images beyond train_limit"""

class Flickr30k(_Flickr30k):
    """Flickr30k: 31,783 images with five captions; splits are Karpathy's or drawn by the seed."""
    root: str | tuple[str, ...]
    """Folder, or folders in order, of the images"""
    size: int = 224
    """Height and width in pixels"""
    channels: Literal[1, 3] = 3
    """1 grey, 3 colour; images are converted"""
    captions: int = 5
    """Captions per image: its first ones"""
    context: int = 77
    """Tokens of a caption; CLIP: 77"""
    tokenizer: _WordSettings | _BpeFileSettings = ...
    """words: of the captions; bpe: of a file, as CLIP's"""
    validation: float = 0.1
    """Share of images, without a split file"""
    test: float = 0.1
    """Share of images, without a split file"""
    train_limit: int | None = None
    """At most this many training images"""
    test_limit: int | None = None
    """At most this many test images"""
    on_error: Literal['stop', 'skip'] = 'stop'
    """On unreadable images: stop and list all of them, or skip them"""
    seed: int = 0
    """Draws splits and limits"""
    captions_file: str | None = None
    """results_20130124.token; not with karpathy"""
    karpathy: str | None = None
    """dataset_flickr30k.json"""

class ImageFolder(_ImageFolder):
    """Images in ``root/{train,validation|val,test}/<class>/``, or all in ``root/<class>/``.

    A missing ``validation`` or ``test`` is drawn from ``train``, or from ``root`` if that has no
    ``train``. Images are resized so that the short side is ``size``, then cropped to the centre."""
    seed: int = 0
    """Seed of the splits and of the limits below"""
    validation: float = 0.1
    """Share (below 1) or number of training images"""
    train_limit: int | None = None
    """Images, in proportion to classes"""
    test_limit: int | None = None
    """Images, in proportion to classes"""
    root: str
    """Has class folders, or train/, validation/ (or val/) and test/"""
    size: int = 32
    """Height and width in pixels"""
    channels: Literal[1, 3] = 3
    """1 grey, 3 colour; images are converted"""
    short_side: int | None = None
    """pixels, of uncropped JPEG; null: raw squares"""
    on_error: Literal['stop', 'skip'] = 'stop'
    """On unreadable images: stop and list all of them, or skip them"""
    test: float = 0.2
    """Share of each class for test, if no test/"""
    name: str | None = None
    """Card's name; null: the folder's name"""
    licence: str = 'not stated'
    """Licence of the images, for the card"""

class Imagenet(_Imagenet):
    """Images in ``root/train/<wnid>/``, and in ``root/val/<wnid>/``, which are the test set here.

    Images are decoded in parallel to ``size`` once. Unfinished work stays in ``cache``, so a killed
    run resumes."""
    seed: int = 0
    """Seed of the splits and of the limits below"""
    validation: float = 10000
    """Share (< 1) or number of training images"""
    train_limit: int | None = None
    """Images, in proportion to classes"""
    test_limit: int | None = None
    """Images, in proportion to classes"""
    root: str = 'data/raw/imagenet'
    """Has train/ and val/ with a folder per wnid"""
    size: int = 64
    """Height and width in pixels"""
    channels: Literal[1, 3] = 3
    """1 grey, 3 colour; images are converted"""
    short_side: int | None = None
    """pixels, of uncropped JPEG; null: raw squares"""
    on_error: Literal['stop', 'skip'] = 'stop'
    """On unreadable images: stop and list all of them, or skip them"""
    cache: str = '.state/imagenet'
    """Unfinished work, on the artifacts' disk"""

class Mosaic(_Mosaic):
    """Mosaics of ``grid`` × ``grid`` images of ``source``; labels are all classes that occur."""
    source: _FashionMnist | _Digits
    """Source of the cells; its splits stay separate"""
    grid: int = 2
    """Cells along each side of a mosaic"""
    train: int = 20000
    """Number of mosaics for training"""
    validation: int = 2000
    """Number of mosaics for validation"""
    test: int = 2000
    """Number of mosaics for the test"""
    seed: int = 0
    """Draws the images of each mosaic"""

class Phantom(_Phantom):
    """Scans of simulated people; results hold for the simulation only, not for real brains.

    Head size, tissue volumes, ventricles, lesions and scanners vary independently, given age and
    sex."""
    seed: int = 0
    """Seed of the splits, and of simulated people"""
    validation: float = 0.15
    """Share of participants for validation"""
    test: float = 0.25
    """Share of the participants for the test"""
    age_groups: int = 8
    """Equal age groups, per sex, of the splits"""
    test_sites: tuple[str, ...] = ...
    """Sites that are the test set; (): drawn"""
    subjects: int = 480
    """Number of simulated people"""
    preset: Literal['demo', 'realistic'] = 'demo'
    """Variation at one age: demo (small) or realistic"""
    voxel_mm: Literal[3, 2] = 3
    """Voxel side, mm; 2: 3 mm scans resampled to 96³"""

class Scripts(_Scripts):
    """Renderings of letters, labelled by character; a channel hidden from models has the script.

    Each image has a font, size, rotation, shear and shift drawn from the seed, the character and
    the image's number. A letter that a font leaves blank, or draws with the pixels of a letter
    chosen before it, is left out. ``{split}_renderings.csv`` has the font and style of each image."""
    root: str | tuple[str, ...] = ...
    """Folder of TrueType and OpenType fonts, or several: the first that exists"""
    sha256: str | None = None
    """Fonts' checksum (card.json: fonts); null: any"""
    scripts: tuple[str, ...] | None = None
    """Only these scripts, by Unicode's names; null: all"""
    without: tuple[str, ...] = ...
    """Not these scripts"""
    ranks: tuple[int, int] | None = None
    """First and last rank of scripts by number of letters; 1: most; null: all"""
    characters: int | None = None
    """Number of drawn characters; null: all"""
    per_script: int | None = None
    """Most characters per script; null: all"""
    split: Literal['renderings', 'fonts'] = 'renderings'
    """Test images are other renderings, or of other font families"""
    train: int = 12
    """Images per character for training"""
    validation: int = 3
    """Images per character for validation"""
    test: int = 3
    """Images per character for the test"""
    size: int = 28
    """Height and width in pixels"""
    distortion: float = 1.0
    """Factor of up to 30 % smaller, 15°, shear 0.2, shift 8 %"""
    seed: int = 0
    """Draws characters, fonts and renderings"""

class Spreadsheet(_Spreadsheet):
    """One T1-weighted volume per row of a spreadsheet; settings name its columns and codes.

    Patterns find the files by {prefix}, the participant's id (and session). Volumes must be as for
    ``bids``."""
    voxel_mm: float = 3.0
    """Voxel side, mm; volumes are resampled"""
    size: tuple[int, int, int] = ...
    """Right, anterior, superior, in voxels; multiples of 16"""
    seed: int = 0
    """Seed of the splits, and of simulated people"""
    validation: float = 0.15
    """Share of participants for validation"""
    test: float = 0.25
    """Share of the participants for the test"""
    age_groups: int = 8
    """Equal age groups, per sex, of the splits"""
    test_sites: tuple[str, ...] = ...
    """Sites that are the test set; (): drawn"""
    root: str
    """Folder of the cohort; derivatives may lie below it"""
    t1: str
    """The T1w volume: a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix}
    for sub-01 or sub-01_ses-1, * for anything"""
    mask: str | None = None
    """Brain mask, as t1; null: voxels over half tissue"""
    maps: _TissueMapPatterns | None = None
    """Tissue probability maps; null: none"""
    dseg: _Dseg | None = None
    """Tissue as one label map; needs maps: null"""
    diagnoses: tuple[str, ...] | None = None
    """Only these of the column `diagnosis`; null: all"""
    train_diagnoses: tuple[str, ...] | None = None
    """Participants with others are only in test; null: no rule"""
    on_error: Literal['stop', 'skip'] = 'stop'
    """On problems: stop and list all of them, or skip those subjects"""
    cache: str = '.state/volumes'
    """Folder: prepared volumes of unchanged files"""
    name: str = 'cohort'
    """Name of the cohort in the card and the report"""
    licence: str = 'not stated'
    """Licence of the data, for the card"""
    table: str
    """The table below root, a spreadsheet saved as .csv or .tsv"""
    columns: _ColumnNames = ...
    """Names of the table's columns"""
    sexes: dict[str, Literal['F', 'M']] = ...
    """The table's code of a sex → F or M, such as {1: M, 2: F}"""
    digits: int = 0
    """Digits of ids in file names; zeros are added"""
    site_in_name: str | None = None
    """A regular expression for the T1's file name, whose group is the site"""

class Subspaces(_Subspaces):
    """Images of the form B_k z + noise: B_k one of D random orthonormal bases, z r normal numbers.

    The label is the index of z's largest entry; models do not see k, the image's kind. An image and
    its negative are equally likely, so a linear router never sends both to one expert."""
    train: int = 16000
    """Number of images for training"""
    validation: int = 4000
    """Number of images for validation"""
    test: int = 10000
    """Number of images for the test"""
    seed: int = 0
    """Draws the rule and the images"""
    subspaces: int = 16
    """Number of subspaces D"""
    rank: int = 4
    """Rank r of each subspace, and number of classes"""
    size: int = 6
    """Side of an image S, pixels"""
    noise: float = 0.1
    """Expected norm of noise / norm of signal"""

class TissueMapPatterns(_TissueMapPatterns):
    """File name patterns of the probability maps of the three tissues."""
    wm: str = '{folder}/anat/{prefix}*_label-WM_probseg.nii*'
    """White matter: a pattern below root; {folder} stands for sub-01 or sub-01/ses-1, {prefix} for
    sub-01 or sub-01_ses-1, * for anything"""
    gm: str = '{folder}/anat/{prefix}*_label-GM_probseg.nii*'
    """Grey matter"""
    csf: str = '{folder}/anat/{prefix}*_label-CSF_probseg.nii*'
    """Fluid"""

class TwoCohorts(_TwoCohorts):
    """Training and validation on participants of ``first``, testing on all of ``second``.

    A site or a volume of one must not be in the other. This source's split settings count; the
    settings of splits in ``first`` and ``second`` are ignored."""
    seed: int = 0
    """Seed of the splits, and of simulated people"""
    validation: float = 0.15
    """Share of participants for validation"""
    test: float = 0.25
    """Share of the participants for the test"""
    age_groups: int = 8
    """Equal age groups, per sex, of the splits"""
    test_sites: tuple[str, ...] = ...
    """Sites that are the test set; (): drawn"""
    first: _Bids | _Spreadsheet
    """The training cohort: bids or spreadsheet"""
    second: _Bids | _Spreadsheet
    """The test cohort, on the same grid"""

class Wikitext(_Wikitext):
    """Text in ``root/wiki.{train,valid,test}.tokens`` or ``.txt``, words separated by blanks."""
    block: int = 64
    """Tokens per block, M; a block is one item"""
    context: int = 3
    """Blocks read before each block, where models start without memory; model.depth · model.span /
    block of them are as good as all of the text"""
    root: str
    """folder with the three files"""
    name: str = 'wikitext'
    """wikitext-103: numbers of words and tokens checked"""
    licence: str = 'CC BY-SA 3.0'
    """licence of the text, for the card"""

class WordSettings(_WordSettings):
    """Settings of a tokenizer whose vocabulary is the training captions' words."""
