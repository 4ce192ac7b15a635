"""Text on which models are compared."""

# English, code, figures and three other scripts: a wrong rope, norm or bias shows on any of it.
TEXT = """\
The harbour at Visby was once ringed by a wall of limestone, three and a half kilometres long, with forty-four towers.
Merchants from Lübeck and Novgorod met there; furs, wax and honey went west, and salt, cloth and silver came back.
When the herring moved away from the coast in the fifteenth century, the trade moved with them.

Q: A train leaves at 09:40 and covers 252 km at 84 km/h. When does it arrive?
A: 252 / 84 = 3 hours, so it arrives at 12:40.

def moving_average(values: list[float], width: int) -> list[float]:
    total, result = sum(values[:width]), []
    for i in range(width, len(values) + 1):
        result.append(total / width)
        if i < len(values):
            total += values[i] - values[i - width]
    return result

Wer rastet, der rostet. L'appétit vient en mangeant. Тише едешь, дальше будешь. 千里之行，始于足下。
To bake bread, mix 500 g of flour with 350 ml of water, 10 g of salt and 3 g of yeast; let it rise for 12 hours at
18 °C, fold it twice, and bake it for 45 minutes in a closed pot at 230 °C. The crust sings while it cools.
"""
