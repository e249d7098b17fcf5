"""What a study found, as one HTML page without a network, as Markdown with the same numbers, and as text.

findings    runs and what is asked of them
statistics  means, paired differences, what it took to reach a target
tables      of text, the same for every form
charts      SVG
page        all of it, written
"""
