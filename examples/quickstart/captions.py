"""The quickstart's conversations: our own words about photographs that ship inside the scikit-image wheel."""

PHOTOS = (
    *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg"),
)
"""Files of `skimage/data` in the wheel itself; nothing is downloaded."""


def _row(images: list[str], *turns: str, system: str | None = None) -> dict:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]
    return {"messages": messages, "images": [f"images/{name}" for name in images]}


ROWS = (
    _row(
        ["astronaut.png"],
        "<image>Who is in this picture?",
        "A smiling astronaut in an orange suit.",
        "What stands behind her?",
        "A flag on the left and a model of the space shuttle on the right.",
    ),
    _row(["chelsea.png"], "<image>Describe the animal.", "A ginger tabby cat with green eyes looks past the camera."),
    _row(["coffee.png"], "What is on the table?<image>", "A red cup of espresso on a red saucer, with a small spoon."),
    _row(
        ["rocket.jpg"],
        "<image>\nWhat is about to happen?",
        "A white rocket waits on its launch pad at dusk.",
        "How is the pad lit?",
        "By a row of bright lamps near the ground.",
        "And the thin towers?",
        "They catch lightning.",
    ),
    _row(
        ["camera.png"], "<image>What is the man doing?", "He looks through a camera on a tripod, in a long dark coat."
    ),
    _row(
        ["coins.png"],
        "<image>How many rows of coins are there?",
        "<think>I count the rows from top to bottom: one, two, three, four.</think>Four rows.",
    ),
    _row(
        ["motorcycle_left.png"],
        "<image>Where is the motorcycle?",
        "A red motorcycle stands in a garage, in front of shelves with boxes.",
    ),
    _row(["moon.png"], "<image>What is this?", "The surface of the moon, with a round crater at the upper left."),
    _row(["hubble_deep_field.jpg"], "<image>What are the small lights?", "Galaxies, far away, on a black sky."),
    _row(
        ["brick.png", "grass.png"],
        "<image><image>What do the two pictures show?",
        "The first shows bricks, the second grass.",
        "Which of them is regular?",
        "The bricks: they lie in straight columns.",
    ),
    _row(["gravel.png"], "<image>What is the ground made of?", "Of gravel: small grey stones with sharp edges."),
    _row(
        ["retina.jpg"],
        "<image>Which organ is this?",
        "The back of an eye, with its red vessels and a bright disc.",
        system="Answer like a doctor.",
    ),
    _row(["page.png"], "<image>What is the heading?", "Region-based segmentation."),
    _row(["ihc.png"], "<image>What kind of picture is this?", "Tissue under a microscope, stained brown and blue."),
    _row([], "What colour is a ripe lemon?", "Yellow.", "And a lime?", "Green."),
    _row(
        ["coffee.png", "chelsea.png", "moon.png"],
        "<image>One. <image>Two. <image>Three. Which one is alive?",
        "The second: it is a cat.",
    ),
)
"""Sixteen rows: one to three turns, no image to three images, a system text, a thought."""
