//! The findings as JUnit XML, which continuous integration shows beside the tests.

use std::io::Write;

use anyhow::Result;
use lowtide_trace::OneLine;
use quick_xml::Writer;
use quick_xml::events::{BytesDecl, Event};

use super::finding::Finding;

/// Writes a test suite with a test case for each finding.
///
/// # Errors
///
/// If `writer` fails.
pub(super) fn write(findings: &[Finding], writer: &mut dyn Write) -> Result<()> {
    let failed = findings.iter().filter(|finding| !finding.passed).count();
    let mut xml = Writer::new_with_indent(writer, b' ', 2);
    xml.write_event(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))?;
    let suite = xml.create_element("testsuite").with_attributes([
        ("name", "lowtide check"),
        ("tests", &*findings.len().to_string()),
        ("failures", &*failed.to_string()),
        ("errors", "0"),
    ]);
    suite.write_inner_content(|xml| {
        for finding in findings {
            case(finding, xml)?;
        }
        Ok(())
    })?;
    xml.get_mut().write_all(b"\n")?;
    Ok(())
}

fn case(finding: &Finding, xml: &mut Writer<&mut dyn Write>) -> std::io::Result<()> {
    // XML has no control characters.
    let class = OneLine(&finding.path).to_string();
    let name = format!("{}, device {}", finding.name, finding.device);
    let case = xml.create_element("testcase");
    let case = case.with_attributes([("classname", &*class), ("name", &*name), ("time", "0")]);
    if finding.passed {
        case.write_empty()?;
    } else {
        let message = ("message", &*finding.what);
        case.write_inner_content(|xml| {
            xml.create_element("failure")
                .with_attribute(message)
                .write_empty()?;
            Ok(())
        })?;
    }
    Ok(())
}
