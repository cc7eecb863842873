"""Random views of images and volumes, with the affine that made each; mixing of images."""
