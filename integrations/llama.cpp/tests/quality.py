"""Losses in a table, and texts with a passkey."""


def cells(loss, bases):
    """A loss in columns of a table, also relative to those of `bases`, of which some may be None."""
    return [f"{loss:.4f}", *("" if base is None else f"{100 * (loss / base - 1):+.2f} %" for base in bases)]


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEYS = ["71432", "28905", "60174", "93581", "45026"]
PLACES = [0.02, 0.25, 0.5, 0.75, 0.95]
# The tokens of a passkey's text that are decoded one by one: the end of the question, and the answer.
ASKED = 24


def passkeys(repetitions, places):
    """Texts with a passkey behind these shares, as Mohtashami and Jaggi (2023) ask for one: place, key, text. 165 repetitions are 4,000 tokens."""
    for place, key in zip(places, KEYS):
        before = round(place * repetitions)
        yield place, key, ("There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n" + FILLER * before
                           + f"The pass key is {key}. Remember it. {key} is the pass key. " + FILLER * (repetitions - before)
                           + f"\nWhat is the pass key? The pass key is {key}")
