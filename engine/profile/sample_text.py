"""Text on which formats of weights are judged: some of what people read and write in chats."""

SAMPLE_TEXT = """\
The harbour of Lindhaven froze twice in the last century, and both times the town lived on \
what the railway brought. Old people still tell how the trains came in at night, slowly, with \
men walking in front of the engine to knock the ice off the points. Nobody was paid for it. \
The bakers left bread at the station, the smith mended shovels for nothing, and in the morning \
the children found the streets as white and quiet as a sheet of paper. When the thaw came in \
March, the first ship that entered the harbour carried oranges. For a week the whole town \
smelled of them.

How does bread rise? Yeast is a living thing, a fungus of a single cell. In warm, wet dough it \
eats the sugars that enzymes make out of the starch in flour, and gives off carbon dioxide and \
a little alcohol. The gas collects in small bubbles. They would burst if the dough were not \
elastic: two proteins in wheat join to long chains, called gluten, when the dough is kneaded, \
and these chains hold the bubbles like a net. In the oven the gas expands, the alcohol boils \
off, and at about 70 degrees the starch sets, so that the loaf keeps its shape. Salt slows the \
yeast down and makes the net stronger, which is why a dough without salt rises fast and tastes \
of nothing.

Could you help me with an e-mail to my landlord? The heating in the kitchen has not worked \
since Monday, and he has not answered two calls. I want to be polite but firm.

Of course. Here is a draft:

Dear Mr Hansen,

since Monday, 14 November, the heating in our kitchen has not worked. I called you on Tuesday \
and again on Wednesday and could not reach you. The temperature in the room was 12 degrees \
this morning. Please let me know by Friday when somebody can come and repair it. I am at home \
every day after five o'clock, and a neighbour has a key for the hours before.

With kind regards,
Maria Lopez

You could add that you will have to reduce the rent if nothing happens, but I would keep this \
for a second letter.

Three numbers in a row add up to 72. Which are they? Let the middle one be n. Then the numbers \
are n - 1, n and n + 1, and their sum is 3n. From 3n = 72 follows n = 24, so the numbers are \
23, 24 and 25. Check: 23 + 24 + 25 = 72. In the same way, five numbers in a row that add up to \
100 have 20 in their middle: 18, 19, 20, 21, 22.

To count how often each word occurs in a file, a few lines of Python are enough:

from collections import Counter
from pathlib import Path

def count_words(path):
    text = Path(path).read_text(encoding="utf-8").lower()
    words = [word.strip(".,;:!?") for word in text.split()]
    return Counter(word for word in words if word)

for word, count in count_words("letters.txt").most_common(10):
    print(f"{count:6d}  {word}")

The function reads the whole file at once. For a file that does not fit into memory, go \
through it line by line and update the counter with each of them; the result is the same.

What should a first-aid box contain? Keep it short and check it twice a year:
1. Plasters in several sizes, and a roll of tape.
2. Sterile dressings and two elastic bandages.
3. Scissors, tweezers, and a pair of gloves that are not made of latex.
4. A blanket of foil, which weighs almost nothing and keeps a person warm.
5. A list of telephone numbers: the emergency number, your doctor, the poison centre.
Medicines do not belong in it. They expire, and in a hurry people take the wrong ones.

The council met on 3 May 2019 to decide on the bridge. The engineers had asked for 4.2 \
million; the treasurer could offer 2.8 million and a loan at 1.5 percent. Mrs Okafor, who has \
sat on the council since 2006, pointed out that every year of waiting had made the repair \
about eight percent dearer. "We have been saving money on this bridge for eleven years," she \
said, "and it has cost us half of what it is worth." The vote was nine to four. Work began in \
September, and on the first Sunday of the following June a brass band, two horses and some \
three hundred people walked across.

Light needs a little more than eight minutes from the sun to the earth, about four hours to \
Neptune and four years to the nearest star. What we see in the night sky is therefore never \
the present. Some of the stars may have ended long ago, and the news is still on its way. \
Astronomers make use of this delay: whoever looks far enough away looks back to a time when \
there were no planets yet. Telescopes on mountains do it well, since the air above them is dry \
and still; telescopes in space do it better, since there is no air above them at all.

Is it true that we use only a tenth of our brain? No. Pictures of the brain at work show that \
all of its parts are active in the course of a day, many of them even while we sleep, and \
damage to almost any part has consequences. The saying is old, and nobody knows for certain \
who said it first. It may have come from a remark that most people use only a small part of \
their talents, which is something quite different, and may well be true.
"""
