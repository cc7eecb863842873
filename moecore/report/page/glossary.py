"""Words of the page that a reader may not know, and the columns that they explain."""

WORDS = {
    "mixture of experts": "a layer with several small networks, the experts, of which each "
    "token uses only a few",
    "router": "the part of such a layer that decides which experts see a token; a token is "
    "the vector of one patch of the image",
    "worst case": "an image counts as right only if no attack broke it; of errors the largest "
    "one over all attacks counts",
    "load CV²": "how unevenly the experts are used: variance / mean² of the tokens per "
    "expert; 0 where all get equally many",
    "agreement": "share of tokens with the same top-1 expert in two runs of the router: two "
    "epochs, two views, student and teacher, before and after fine-tuning",
    "IMED": "image Euclidean distance, which counts neighbouring pixels: here between maps of "
    "router outputs over an image and over the same image shifted, rotated, scaled or sheared; "
    "0 where the router sees no change",
    "mCE": "mean corruption error: errors under noise, blur, weather and the like as a share "
    "of the dense model's; below 1 is better than dense",
}  # in the order in which a reader meets them

# How the names of columns begin or end → the word that explains them.
BEGINNINGS = {
    "agreement_": "agreement",
    "teacher_agreement": "agreement",
    "imed": "IMED",
    "load_cv2": "load CV²",
    "mce": "mCE",
}
ENDINGS = {"_worst_case": "worst case"}


def find_explaining_word(column: str) -> str:
    """Return the key of WORDS that explains a column, by its name; "" where none does."""
    for beginning, word in BEGINNINGS.items():
        if column.startswith(beginning):
            return word
    for ending, word in ENDINGS.items():
        if column.endswith(ending):
            return word
    return ""
