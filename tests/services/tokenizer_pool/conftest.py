import sys
from pathlib import Path

# importlib mode puts no test folder on the path; these tests share a module
sys.path.append(str(Path(__file__).parent))
