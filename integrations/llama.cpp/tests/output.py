"""The driver's output, read: the one place that knows the form of its lines."""

import re


class Output:
    """What the driver printed, whatever its command. What it did not print, because of its command or since it failed, is None or empty here."""

    def __init__(self, text):
        text = text[: text.rfind("\n") + 1]  # a run that failed may have left its last line unfinished
        self.text = text
        lines = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        counters = re.findall(r"^counters(.*)$", text, re.MULTILINE)
        self.all_counters = [{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)} for line in counters]
        self.counters = self.all_counters[-1] if self.all_counters else {}
        self.sum = lines.get("sum")
        self.tops = lines.get("tops", "").split()
        self.leads = [float(lead) for lead in lines.get("leads", "").split()]
        self.embeddings = [[float.fromhex(number) for number in found.split()] for found in re.findall(r"^embedding (.*)$", text, re.MULTILINE)]
        self.loss = float(lines["tokens"].split()[2]) if "tokens" in lines else None

    def __getitem__(self, counter):
        """One of Vanward's counters, as the driver printed it last; it does not print those that are 0."""
        return self.counters.get(counter, 0)

    def equal_tops(self, stock):
        """Shares of the top tokens that are also stock's: of all, and of those whose logit is .3 ahead of the next in stock."""
        same = [a == b for a, b in zip(self.tops, stock.tops, strict=True)]
        clear = [each for each, lead in zip(same, stock.leads) if lead > 0.3]
        return sum(same) / len(same), sum(clear) / max(len(clear), 1)

    def digits_found(self, key):
        """How many digits of a passkey are the top token, by each variant of the driver's command `compare`."""
        (given,) = re.findall(r"^given (.*)$", self.text, re.MULTILINE)
        return {name: sum(a == b for a, b in zip(tops.split()[-1 - len(key) : -1], given.split()[-len(key) :], strict=True))
                for name, tops in re.findall(r"^tops (\w+) (.*)$", self.text, re.MULTILINE)}
