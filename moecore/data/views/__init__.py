"""Random views of images and volumes with the affines that made them; mixing of images."""
