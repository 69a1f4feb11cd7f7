// Reads the PTX that nvcc writes, and decodes its instructions.
#ifndef JAXFP8_TESTS_CUDA_PTX_PARSER_H_
#define JAXFP8_TESTS_CUDA_PTX_PARSER_H_

#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "program.h"

namespace ptx {

// At the commas that are outside of brackets; without the spaces around the parts.
std::vector<std::string> SplitOperands(std::string_view text);
std::string_view Trim(std::string_view text);

// A type such as "u32" or "b8" (5.2): how many bits it has. Faults where there is no such type.
int BitsOf(std::string_view type);

// Parses one kernel of a file.
class Parser {
 public:
  // `at`: where the text after ".entry " begins. `shared`: variables of the file.
  Parser(const std::string& file, const std::string& text, size_t at, const std::vector<Variable>& shared);
  Kernel Parse();

  // For the decoders: registers of operands.
  int Result(const std::string& operand);  // -1 for `_`
  int Source(const std::string& operand);  // a register, a constant, a special register or the address of a variable
  int Constant(uint64_t value);
  // Decodes [register + offset]; the register becomes source `slot`.
  void Address(const std::string& operand, size_t slot, Instruction* in);
  // Decodes {a, b, ...}, or one register, to results or sources from `slot` on; their number.
  int Results(const std::string& operand, Instruction* in);
  int Sources(const std::string& operand, size_t slot, Instruction* in);
  std::vector<int> Registers(const std::string& operand);

  // `.shared` and `.param` variables (5.4).
  static Variable ParseVariable(std::string_view text);

 private:
  void ParseHeader();
  void ParseBody();
  std::string_view NextStatement();
  void Declare(std::string_view statement);
  void Decode(std::string_view statement);
  void SkipSpace();
  int NewRegister() { return kernel_.registers++; }
  int Special(int* slot);
  const int* Lookup(const std::string& name) const;
  bool AddressOfVariable(const std::string& name, uint64_t* address);
  void PlaceShared(Variable* variable);

  const std::string& text_;
  size_t at_;
  int line_;
  const std::vector<Variable>& file_shared_;
  Kernel kernel_;
  std::vector<std::unordered_map<std::string, int>> scopes_;
  std::unordered_map<std::string, int> labels_;
  std::vector<std::pair<std::string, size_t>> branches_;  // label, instruction
  std::map<uint64_t, int> constants_;
};

// Decodes an instruction of one result whose sources are all registers or constants; false where `actions` lacks it.
bool DecodeByOpcode(const std::unordered_map<std::string, Action>& actions, Parser&, const std::string& opcode,
                    const std::vector<std::string>& operands, Instruction* in);

// The decoders, by family: each returns false where the instruction is none of its own.
using Decoder = bool (*)(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);
bool DecodeArithmetic(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);
bool DecodeMove(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);
bool DecodeAccess(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);
bool DecodeCollective(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);
bool DecodeWarpgroup(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);
bool DecodeBulk(Parser&, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in);

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_PARSER_H_
