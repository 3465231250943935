"""What the driver says about a text: the loss of each token given, its top tokens, and whether a passkey is found."""

import re


class Score:
    """What the driver's commands `score` and `steps` print in the end."""

    def __init__(self, printed):
        words = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.split()}
        self.loss, self.tops, self.leads = float(words["tokens"][2]), words["tops"], [float(lead) for lead in words["leads"]]
        self.counters = counters(printed)[-1]

    def equal(self, stock):
        """Shares of equal top tokens: of all, and of those whose logit is .3 ahead of the next in stock."""
        same = [a == b for a, b in zip(self.tops, stock.tops, strict=True)]
        clear = [each for each, lead in zip(same, stock.leads) if lead > 0.3]
        return sum(same) / len(same), sum(clear) / max(len(clear), 1)


def counters(printed):
    """Vanward's counters, each time the driver printed them."""
    return [{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)} for line in re.findall(r"^counters(.*)$", printed, re.MULTILINE)]


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


def digits_found(printed, key):
    """How many digits of the key are the top token, by each variant of the driver's command `compare`."""
    (given,) = re.findall(r"^given (.*)$", printed, re.MULTILINE)
    return {name: sum(a == b for a, b in zip(tops.split()[-1 - len(key) : -1], given.split()[-len(key) :], strict=True))
            for name, tops in re.findall(r"^tops (\w+) (.*)$", printed, re.MULTILINE)}
