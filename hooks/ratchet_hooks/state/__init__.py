"""Hook state as bytes: encoding, files, random number generators."""
