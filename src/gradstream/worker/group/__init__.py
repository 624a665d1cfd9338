"""The group topology: workers sum their gradients among themselves, and each makes the update itself."""
