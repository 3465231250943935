"""The part `text` of `run`: losses of a model that has learned a language, and passkeys, stock and through Vanward on a GPU.

Everything is played by `play(part, options, command, arguments)`, which returns what the driver prints: stock where `options` is None, otherwise with
these of Vanward's options. Caches are sparse from the first token on; prompts are ggml's in any case.
"""

import concurrent.futures
import json
import pathlib

import quality
from output import Output

KINDS = [(method, block) for method in ["axis", "minmax"] for block in [16, 64]]
SHARES = [50, 25]


def name_of(method, block, share):
    return f"{method.upper()}, {share} %, blocks of {block}"


def settings(kinds, shares):
    """What is compared, and Vanward's options for it."""
    return {
        "stock": None,
        "every token, dense": {"STRATEGY": "dense"},
        **{name_of(method, block, share): {"METHOD": method, "BLOCK": block, "BUDGET": f"{share}%"} for method, block in kinds for share in shares},
    }


def verdict(options, counted, count, attentions):
    """Whether each attention of the `count` steps was what it was to be. `attentions`: those of the dense run, in every layer and step."""
    if options is None:
        return "well" if not counted else "WRONG: Vanward was there"
    kind, other = ("dense", "sparse") if options.get("STRATEGY") == "dense" else ("sparse", "dense")
    took_all = counted.get(kind, 0) == attentions > 0 and attentions % count == 0 and other not in counted
    return "well" if took_all and not counted.get("errors") and not counted.get("passed") else "WRONG"


def losses(play, text, depth, count, log, at_once=4, kinds=KINDS, shares=SHARES):
    """Prints a table of losses with each token of a text given, one a step. Returns whether all is well."""
    wanted = settings(kinds, shares)

    def score(number_and_name):
        number, name = number_and_name
        out = Output(play(f"text-{text.stem}-{number}", wanted[name], "score", {"text": text, "depth": depth, "count": count}))
        # The counters are the last line of a run that did not fail.
        return out if out.all_counters else None

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        scores = dict(zip(wanted, pool.map(score, enumerate(wanted))))
    stock, dense = list(scores.values())[:2]
    attentions = dense.counters.get("dense", 0) if dense else 0
    print(f"\n{text.stem}, {count} tokens after {depth}\n\n| | loss | over stock | over dense | top token equal to stock's | of those that lead by .3 | "
          "attentions: sparse, dense | steps replayed | |\n|---|---|---|---|---|---|---|---|---|")
    is_well = True
    for name, score in scores.items():
        if score is None or stock is None:
            print(f"| {name} | FAILED |")
            is_well = False
            continue
        is_right = verdict(wanted[name], score.counters, count, attentions)
        is_well &= is_right == "well"
        shares_equal = score.equal_tops(stock)
        cells = [*quality.cells(score.loss, [None if name == "stock" else stock.loss, None if dense is None or score is dense else dense.loss]),
                 *(f"{100 * share:.1f} %" for share in shares_equal),
                 f"{score.counters.get('sparse', 0)}, {score.counters.get('dense', 0)}", str(score.counters.get("replayed", 0)), is_right]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        log.write(json.dumps({"text": text.stem, "depth": depth, "tokens": count, "setting": name, "loss": score.loss, "equal": shares_equal[0],
                              "equal_clear": shares_equal[1], "counters": score.counters, "verdict": is_right}) + "\n")
    return is_well


def passkeys(play, folder, log, at_once=4, kinds=KINDS, shares=SHARES, repetitions=165, places=quality.PLACES):
    """Prints how many digits of a passkey are found behind each place. Returns whether each step was what it was to be."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(quality.passkeys(repetitions, places))
    budgets = {f"budget{share}": f"{share}%" for share in shares}
    # The last blocks alone do not have the key: what finds it is selection.
    variants = ",".join(["stock/ENABLED=0", *(f"{name}/BUDGET={budget}" for name, budget in budgets.items()), "last/BUDGET=16"])

    def find(job):
        (method, block), (place, key, text) = job
        path = folder / f"passkey-{method}-{block}-{round(100 * place)}.txt"
        path.write_text(text)
        # More than one row a step is a prompt.
        out = Output(play(path.stem, {"METHOD": method, "BLOCK": block, "ROWS": 1}, "compare",
                          {"text": path, "depth": -quality.ASKED, "variants": variants}))
        try:
            found = out.digits_found(key)
        except ValueError:
            return {}, False
        taken = [each.get("sparse", 0) for each in out.all_counters]
        grown = [after - before for before, after in zip(taken, taken[1:])]
        is_right = (len(found) == len(budgets) + 2 and taken[:1] == [0] and len(set(grown)) == 1 and grown[0] > 0 and grown[0] % quality.ASKED == 0
                    and not out["errors"] and not out["passed"])
        return found, is_right

    jobs = [(kind, text) for kind in kinds for text in texts]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        results = dict(zip([(kind, text[0]) for kind, text in jobs], pool.map(find, jobs)))
    print(f"\ndigits of a passkey, of {len(texts[0][1])}, behind a share of {repetitions} repetitions, {len(places)} keys\n\n"
          f"| | {' | '.join(f'{100 * place:.0f} %' for place in places)} | |\n|---|{'---|' * len(places)}---|")
    for method, block in kinds:
        here = [results[(method, block), place] for place in places]
        is_right = "well" if all(right for _, right in here) else "WRONG"
        for variant, name in [("stock", f"stock (the runs by {method.upper()} in blocks of {block})"),
                              *((f"budget{share}", name_of(method, block, share)) for share in shares), ("last", "the first and the last blocks alone")]:
            digits = [found.get(variant) for found, _ in here]
            print(f"| {name} | {' | '.join('' if each is None else str(each) for each in digits)} | {is_right} |", flush=True)
            log.write(json.dumps({"passkeys": name, "method": method, "block": block, "places": places, "digits": digits, "verdict": is_right}) + "\n")
    return all(right for _, right in results.values())
