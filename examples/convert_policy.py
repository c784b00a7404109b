"""Convert what ppo.py saved with torch at first, to evaluate it: convert_policy.py policy.pt"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from vecenv.files import save_arrays


@dataclass
class Options:
    file: tyro.conf.Positional[Path]  # policy.pt of the first version
    out: Path | None = None  # file to write; by default the same name with the ending .npz


def main(options: Options) -> Path:
    """Write the new file beside the old one, which stays; return where it is."""
    try:
        saved = torch.load(options.file, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load has many
        raise SystemExit(f"{options.file} can't be read by torch: {error}") from None
    if not isinstance(saved, dict) or not {"kind", "tensors"} <= set(saved):
        raise SystemExit(f"{options.file} is no policy that ppo.py has saved")
    out = options.file.with_suffix(".npz") if options.out is None else options.out
    save_arrays(out, saved)
    print(out)
    return out


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
