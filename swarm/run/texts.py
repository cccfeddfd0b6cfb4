"""How captions are read, by the kind of text encoder that reads them in full."""


from swarm.options import option, options


@options
class ClipText:
    """Of families that read captions with CLIP alone."""

    clip_skip: int = option(
        0,
        "Skip the last N layers of the CLIP text encoder, counted from the one that the family reads; 1: penultimate.",
        ge=0,
        switches={"clip_penultimate": 1},
        section="captions read by CLIP",
    )
    max_token_chunks: int = option(
        1,
        "Chunks of 75 tokens of a caption that are read, each with its own begin and end.",
        ge=1,
        aliases=("extended_mode_chunks", "extended_chunks"),
    )


@options
class T5Text:
    """Of families that read captions in one piece, with a T5 or a language model."""

    max_sequence_length: int = option(512, "Tokens of a caption that are read.", ge=1, section="captions read by T5 or a language model")


READERS = {ClipText: "CLIP", T5Text: "T5"}
