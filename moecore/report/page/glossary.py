"""Terms that the page explains, and the columns to which they belong."""

WORDS = {
    "mixture of experts": "a layer with several small networks, the experts, of which each token "
    "uses only a few",
    "router": "the part of such a layer that decides which experts process a token; a token is "
    "the vector of one image patch",
    "worst case": "an image counts as correct only if no attack changed its prediction; for "
    "errors, the largest over all attacks",
    "load CV²": "how unevenly the experts are used: variance / mean² of the tokens per expert; 0 "
    "if all get the same number",
    "agreement": "share of tokens with the same top-1 expert in two runs of the router: two "
    "epochs, two views, student and teacher, before and after fine-tuning",
    "IMED": "image Euclidean distance, which takes neighbouring pixels into account: here "
    "between the maps of router outputs for an image and for the same image shifted, rotated, "
    "scaled or sheared; 0 if the router outputs are equal",
    "mCE": "mean corruption error: the error under noise, blur, weather and similar corruptions, "
    "divided by the dense model's; below 1 is better than dense",
}  # in the order in which a reader meets them

# Beginnings and ends of column names → the term that explains them.
BEGINNINGS = {
    "agreement_": "agreement",
    "teacher_agreement": "agreement",
    "imed": "IMED",
    "load_cv2": "load CV²",
    "mce": "mCE",
}
ENDINGS = {"_worst_case": "worst case"}


def find_explaining_word(column: str) -> str:
    """Return the key of ``WORDS`` that explains a column, or "" if there is none."""
    for beginning, word in BEGINNINGS.items():
        if column.startswith(beginning):
            return word
    for ending, word in ENDINGS.items():
        if column.endswith(ending):
            return word
    return ""
