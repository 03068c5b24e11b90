"""Images of a folder, without classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fl_elastic.errors import DatasetError

_ENDINGS = (".jpg", ".jpeg", ".png")
# Mean and standard deviation that weights trained on ImageNet expect.
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
_STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]


def images_of_folder(folder: Path, size: int) -> npt.NDArray[np.float32]:
    """Read all JPEG and PNG images in and below a folder, in the order of their paths.

    Parameters
    ----------
    folder : Path
        Folder of the images.
    size : int
        Height and width to which the middle square of each image is resized.

    Returns
    -------
    array of float32, shape (n, 3, size, size)
        Images, normalised as weights trained on ImageNet expect.

    Raises
    ------
    DatasetError
        If there are no images, or one cannot be read.
    """
    from PIL import Image, ImageOps

    paths = sorted(each for each in folder.rglob("*") if each.suffix.lower() in _ENDINGS)
    if not paths:
        raise DatasetError(f"{folder} holds no images that end in {', '.join(_ENDINGS)}")
    found = np.empty((len(paths), 3, size, size), np.float32)
    for row, path in enumerate(paths):
        try:
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (size, size))
        except (OSError, ValueError) as error:  # Pillow's own error is an OSError
            raise DatasetError(
                f"image {path} cannot be read ({error}): remove or replace it"
            ) from None
        pixels = np.moveaxis(np.asarray(square, np.float32), -1, 0) / 255
        found[row] = (pixels - _MEAN) / _STD
    return found
