"""Random views (augmentations) of images and volumes, with their affines; mixing of images."""
