# Run as a script with a path: makes a virtual environment there, with the machine's packages and its pip.
import sys

# Files of the working directory must not take the place of Python's modules.
sys.path[:] = filter(None, sys.path)

import os
import pathlib
import shlex
import venv


class Builder(venv.EnvBuilder):
    def create_configuration(self, context):
        # The second time all else is there. Without its configuration a directory is no virtual environment, so
        # one that was cut short is made again.
        if not self.system_site_packages:
            return
        for name in "pip", "pip3":
            script = os.path.join(context.bin_path, name)
            if not os.path.lexists(script):
                with open(script, "w") as file:
                    file.write(f'#!/bin/sh\nexec {shlex.quote(context.env_exe)} -m pip "$@"\n')
                os.chmod(script, 0o755)
        # pip removes a directory with the last package in it, and Python searches none that was not there at its start.
        for packages in pathlib.Path(context.env_dir).glob("lib/python*/site-packages"):
            (packages / ".keep").touch()
        super().create_configuration(context)


try:
    Builder(system_site_packages=True, symlinks=True).create(sys.argv[1])
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
