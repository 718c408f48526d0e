"""Take pictures of a report for docs/runs.md: python -m report.screenshot RUN (make screenshot
RUN=...) writes docs/report.png, docs/report-dark.png and docs/report-phone.png. It needs Chromium.
"""
import subprocess
import tempfile
from pathlib import Path

import common
from report import command, parser, start

# {name: flags of Chromium}; 0 means dark
PICTURES = {
    "report": ["--window-size=1400,3000"],
    "report-dark": ["--window-size=1400,3000", "--blink-settings=preferredColorScheme=0"],
    "report-phone": ["--window-size=390,1030", "--force-device-scale-factor=2"]}


def take(page, path, flags):
    """Save a small picture of an HTML page, without the empty rows at its end."""
    from PIL import Image, ImageChops  # comes with matplotlib
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.png")
        subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu",
                        "--hide-scrollbars", *flags, f"--screenshot={raw}", page.as_uri()],
                       check=True, capture_output=True)
        picture = Image.open(raw).convert("RGB")
    empty = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    bottom = ImageChops.difference(picture, empty).getbbox()[3]
    picture = picture.crop((0, 0, picture.width, min(bottom + 40, picture.height)))
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("run", metavar="RUN", type=Path, help="run folder with a report.html")
    args = arguments.parse_args(argv)
    report = args.run.resolve() / "report.html"
    if not report.exists():
        common.fail(f"{report}: does not exist; write it: {command('report.page', args.run)}")
    for name, flags in PICTURES.items():
        path = common.HERE / f"docs/{name}.png"
        try:
            take(report, path, flags)
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            common.fail(f"{path}: {error}")
        print(path)


if __name__ == "__main__":
    start(main)
