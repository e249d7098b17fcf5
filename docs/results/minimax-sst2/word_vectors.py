"""Writes the word vectors of a spaCy pipeline for the words of SST-2, as a file that `workload.of.glove` takes.

    pip install spacy     in any environment, with the pipeline en_core_web_md 3.8
    python docs/results/minimax-sst2/word_vectors.py en_core_web_md SST-2/train.tsv vectors.txt

The pipeline has 20,000 vectors of 300 numbers for 684,830 words, trained by continuous bags of words on web pages, the
Wikipedia, subtitles and news. A line of the file is "word number number …", as in the files of GloVe.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import spacy

WORD = re.compile(r"[a-z0-9']+|[!?.,]")  # as in fedfleet.workloads.data.text


def main(pipeline: str, texts: Path, out: Path) -> None:
    vocabulary = spacy.load(pipeline, exclude=["tok2vec", "tagger", "parser", "ner", "lemmatizer"]).vocab
    words = sorted(set(WORD.findall(texts.read_text(encoding="utf-8").lower())))
    known = [word for word in words if vocabulary.has_vector(word)]
    with out.open("w", encoding="utf-8") as file:
        for word in known:
            file.write(" ".join([word, *(f"{number:.6g}" for number in vocabulary.get_vector(word))]) + "\n")
    print(f"{len(known)} of {len(words)} words have a vector; they are in {out}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
